"""The engine: prompts in chunks, slots that change hands, rows that leave while others go on."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_llama
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Speculator
from speccompile.build import PREFILL_WIDTHS, prefill_widths
from speccompile.errors import UnknownTier
from speccompile.runtime.engine import Engine, chunk_widths

VOCAB = 128
TIERS = (0, 1, 3, 7)
MAX_BATCH = 3
MAX_LEN = 128


# --- prompts in chunks -------------------------------------------------------------------------------------------


WIDTHS = (8, 32, 128, 512)


@given(length=st.integers(1, 4000), widths=st.sampled_from([PREFILL_WIDTHS, WIDTHS, WIDTHS[:2], WIDTHS[:1]]))
def test_chunks_cover_the_prompt_and_none_is_superfluous(length: int, widths: tuple[int, ...]) -> None:
    chunks = chunk_widths(length, widths)
    assert set(chunks) <= set(widths)
    assert sum(chunks) >= length
    assert sum(chunks[:-1]) < length
    # What the last chunk is padded with stays small: half of what it holds, or less than the narrowest chunk.
    padding = sum(chunks) - length
    assert padding < widths[0] or padding <= (chunks[-1] - padding) // 2


@given(length=st.integers(1, 4000))
def test_a_length_that_is_a_width_is_one_chunk(length: int) -> None:
    assert (chunk_widths(length, PREFILL_WIDTHS) == [length]) == (length in PREFILL_WIDTHS)


@pytest.mark.parametrize(
    ("length", "chunks"),
    [(1, [8]), (9, [8, 8]), (21, [8, 8, 8]), (22, [32]), (33, [32, 8]), (600, [512, 128]), (1400, [512, 512, 512])],
)
def test_chunks_by_example(length: int, chunks: list[int]) -> None:
    assert chunk_widths(length, WIDTHS) == chunks


@given(max_len=st.integers(2, 5000))
def test_no_prefill_chunk_but_the_smallest_is_wider_than_a_text_can_be(max_len: int) -> None:
    widths = prefill_widths(max_len)
    assert widths == PREFILL_WIDTHS[: len(widths)] and widths
    assert all(width <= max_len for width in widths[1:])
    assert all(width > max_len for width in PREFILL_WIDTHS[len(widths) :])


# --- slots -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=VOCAB)


@pytest.fixture(scope="module", params=["ngram", "early_exit"])
def shared(request: pytest.FixtureRequest, model: LlamaForCausalLM) -> Speculator:
    return speccompile.wrap(model, request.param, tiers=TIERS, max_batch=MAX_BATCH, max_len=MAX_LEN, backend="eager")


@pytest.fixture
def spec(shared: Speculator) -> Iterator[Speculator]:
    shared.set_tier(7)
    shared.stats.reset()
    yield shared
    shared.engine.release()


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(model: LlamaForCausalLM, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt])
    return model.generate(ids, max_new_tokens=new, do_sample=False)[0, len(prompt) :].tolist()


def finish(engine: Engine) -> None:
    while engine.running:
        engine.step()


def test_slots_are_owned_freed_and_owned_again(spec: Speculator) -> None:
    engine = spec.engine
    requests = [engine.admit(prompt(4, seed), max_new_tokens=20, eos=[]) for seed in range(MAX_BATCH)]
    assert sorted(request.slot for request in requests) == list(range(MAX_BATCH))
    finish(engine)
    again = [engine.admit(prompt(4, seed), max_new_tokens=2, eos=[]) for seed in range(MAX_BATCH)]
    assert sorted(request.slot for request in again) == list(range(MAX_BATCH))


def test_a_reused_slot_shows_nothing_of_its_former_owner(spec: Speculator, model: LlamaForCausalLM) -> None:
    """The former owner is longer, drafts other tokens and has an EOS id that the new text contains."""
    engine = spec.engine
    new = prompt(6, seed=1)
    expected = greedy(model, new, 40)
    for _ in range(MAX_BATCH):
        engine.admit(prompt(100, seed=2), max_new_tokens=20, eos=expected[3:8])
    finish(engine)
    for _ in range(MAX_BATCH):
        request = engine.admit(new, max_new_tokens=40, eos=[])
        slot = request.slot
        assert spec.arena["tokens"][slot, :7].tolist() == [*new, expected[0]]
        assert not spec.arena["tokens"][slot, 7:].any(), "text of the former owner"
        assert (spec.arena["eos"][slot] == -1).all()
        finish(engine)
        assert request.new_tokens == expected
        assert request.stats.finish_reason == "max_new_tokens"


def test_random_comings_and_goings(spec: Speculator, model: LlamaForCausalLM) -> None:
    """Requests join whenever a slot is free, among rows at other places of their texts: each text is its own."""
    rng, engine = random.Random(0), spec.engine
    waiting = [(prompt(rng.randint(1, 60), seed), rng.randint(1, 40)) for seed in range(25)]
    admitted = []
    most = 0
    while waiting or engine.running:
        while waiting and len(engine.running) < MAX_BATCH and rng.random() < 0.7:
            text, new = waiting.pop()
            admitted.append((engine.admit(text, max_new_tokens=new, eos=[]), new))
        if engine.running:
            most = max(most, len(engine.running))
            engine.step()
    assert most == MAX_BATCH
    assert len(admitted) == 25
    for request, new in admitted:
        assert request.new_tokens == greedy(model, request.prompt, new)


def test_finished_rows_leave_while_others_go_on(spec: Speculator, model: LlamaForCausalLM) -> None:
    engine = spec.engine
    spec.set_tier(0)
    lengths = [3, 9, 6]
    requests = [engine.admit(prompt(5, seed), max_new_tokens=new, eos=[]) for seed, new in enumerate(lengths)]
    live = []
    while engine.running:
        live.append(len(engine.running))
        took_part = engine.step()
        assert len(took_part) == live[-1]
        # Rows of the next step: the running requests in order, then the dummy slot.
        slots = [request.slot for request in engine.running]
        assert spec.arena["slots"].tolist() == slots + [MAX_BATCH] * (MAX_BATCH - len(slots))
    assert live == [3] * 2 + [2] * 3 + [1] * 3
    assert [request.stats.row_steps for request in requests] == [2, 8, 5]
    for seed, (request, new) in enumerate(zip(requests, lengths, strict=True)):
        assert request.new_tokens == greedy(model, prompt(5, seed), new)
        assert request.finished


def test_a_dead_row_changes_no_live_state(spec: Speculator) -> None:
    """Steps with one live row leave every other slot but the dummy as it was, keys and values included."""
    engine = spec.engine
    first = engine.admit(prompt(20, 1), max_new_tokens=2, eos=[])
    engine.step()
    assert first.finished
    second = engine.admit(prompt(20, 2), max_new_tokens=40, eos=[])
    others = [slot for slot in range(MAX_BATCH) if slot != second.slot]
    per_slot = {name: tensor for name, tensor in spec.arena.items() if tensor.shape[0] == MAX_BATCH + 1}
    before = {name: tensor[others].clone() for name, tensor in per_slot.items()}
    finish(engine)
    assert second.finished
    for name, tensor in per_slot.items():
        assert torch.equal(tensor[others], before[name]), name
    assert not spec.arena["alive"][MAX_BATCH]


@pytest.mark.parametrize(
    ("new", "eos_at", "reason"), [(1, None, "max_new_tokens"), (12, None, "max_new_tokens"), (12, 4, "eos")]
)
def test_finish_reasons(spec: Speculator, model: LlamaForCausalLM, new: int, eos_at: int | None, reason: str) -> None:
    text = prompt(10, seed=3)
    expected = greedy(model, text, new)
    eos = [] if eos_at is None else [expected[eos_at]]
    request = spec.engine.admit(text, max_new_tokens=new, eos=eos)
    finish(spec.engine)
    assert request.stats.finish_reason == reason
    assert request.new_tokens == (expected if eos_at is None else expected[: expected.index(eos[0]) + 1])


def test_a_request_ends_at_max_len(spec: Speculator, model: LlamaForCausalLM) -> None:
    text = prompt(MAX_LEN - 5, seed=4)
    request = spec.engine.admit(text, max_new_tokens=50, eos=[])
    finish(spec.engine)
    assert request.stats.finish_reason == "max_len"
    assert request.new_tokens == greedy(model, text, 5)


def test_a_request_may_end_in_prefill(spec: Speculator) -> None:
    engine = spec.engine
    request = engine.admit(prompt(MAX_LEN - 1), max_new_tokens=50, eos=[])
    assert request.stats.finish_reason == "max_len"
    assert len(request.new_tokens) == 1
    assert not engine.running
    assert spec.stats.steps == 0


# --- failures on the way -----------------------------------------------------------------------------------------


class Breaks:
    """A streamer that raises when it gets its n-th value."""

    def __init__(self, at: int) -> None:
        self.left = at

    def put(self, value: torch.Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("the listener is gone")

    def end(self) -> None:
        raise AssertionError("the end of a text that did not end")


@pytest.mark.parametrize("at", [1, 2, 3, 9])
def test_a_streamer_that_raises_leaves_the_engine_usable(spec: Speculator, model: LlamaForCausalLM, at: int) -> None:
    text = prompt(10, seed=5)
    # More often than there are slots: each failure has to give its slot back.
    for _ in range(MAX_BATCH + 1):
        with pytest.raises(RuntimeError, match="the listener is gone"):
            spec.generate(torch.tensor([text]), max_new_tokens=30, streamer=Breaks(at))
        assert not spec.engine.running
        assert not spec.arena["alive"].any()
    rows = torch.tensor([prompt(10, seed) for seed in range(MAX_BATCH)])
    expected = model.generate(rows, attention_mask=torch.ones_like(rows), max_new_tokens=20, do_sample=False)
    assert torch.equal(spec.generate(rows, max_new_tokens=20), expected)


def test_a_policy_that_asks_for_what_was_not_built_leaves_the_engine_usable(
    spec: Speculator, model: LlamaForCausalLM
) -> None:
    class Wrong:
        def choose(self, live_rows: int) -> int:
            return 2

    spec.engine.policy = Wrong()
    with pytest.raises(UnknownTier, match=r"draft length 2.*0, 1, 3, 7"):
        spec.generate(torch.tensor([prompt(10)]), max_new_tokens=30)
    spec.set_tier(3)
    assert spec.generate(torch.tensor([prompt(10)]), max_new_tokens=30)[0, 10:].tolist() == greedy(
        model, prompt(10), 30
    )


# --- the smallest tier that serves -------------------------------------------------------------------------------


def test_a_ready_drafter_runs_the_smallest_tier_that_serves(model: LlamaForCausalLM) -> None:
    spec = speccompile.wrap(model, "ngram", tiers=TIERS, max_batch=2, max_len=MAX_LEN, backend="eager")
    engine, draft_lens = spec.engine, spec.arena["draft_lens"]
    request = engine.admit(prompt(10), max_new_tokens=60, eos=[])
    # The other slot's row does not run: it has no say.
    draft_lens.fill_(7)
    for proposed, expected in [(0, 0), (1, 1), (2, 3), (3, 3), (4, 7), (7, 7)]:
        draft_lens[request.slot] = proposed
        assert engine.next_tier().draft_len == expected
    spec.set_tier(3)
    assert engine.next_tier().draft_len == 3
    # Of two rows, the longer proposal counts.
    other = engine.admit(prompt(12), max_new_tokens=60, eos=[])
    draft_lens[request.slot], draft_lens[other.slot] = 0, 2
    assert engine.next_tier().draft_len == 3
