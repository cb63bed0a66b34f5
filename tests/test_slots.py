"""Slots: whose KV they hold, which of them is taken next, and that a known beginning is not read again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_families import model_of
from tiny import admitted, cancel_all, tiny_llama
from transformers import PreTrainedModel

import speccompile
from speccompile import Speculator
from speccompile.errors import RequestFailed
from speccompile.graph_capture.state import N, S, StateSpec, core_state, resolve_layout
from speccompile.runtime.arena import Arena
from speccompile.runtime.listener import Listener, make_criteria
from speccompile.runtime.records import Records, Wanted
from speccompile.runtime.request import Params, Request
from speccompile.runtime.slots import Slots
from speccompile.runtime.stats import RequestStats

VOCAB = 128
MAX_BATCH = 3
MAX_LEN = 256


def wrap(model: PreTrainedModel, mode: str = "none", **options: Any) -> Speculator:
    defaults: dict[str, Any] = {"tiers": (0,) if mode == "none" else (0, 3), "max_batch": MAX_BATCH}
    # How prompts are cut does not depend on the clock.
    defaults |= {"max_len": MAX_LEN, "backend": "eager", "prefill_budget": 64}
    return speccompile.wrap(model, mode, **(defaults | options))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama(vocab=VOCAB)


@pytest.fixture(scope="module")
def shared(model: PreTrainedModel) -> Speculator:
    return wrap(model)


@pytest.fixture
def spec(shared: Speculator) -> Iterator[Speculator]:
    """Nothing is known yet."""
    forget(shared)
    yield shared
    cancel_all(shared.engine)


def forget(spec: Speculator) -> None:
    """Let short texts that begin like no other take the place of all that is known."""
    requests = [spec.engine.submit([0, slot], max_new_tokens=1) for slot in range(MAX_BATCH)]
    spec.engine.run()
    assert sorted(request.slot for request in requests) == list(range(MAX_BATCH))


def prompt(length: int, seed: int) -> list[int]:
    """Texts of different seeds share no beginning."""
    rest = torch.randint(VOCAB, (length - 1,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [1 + seed, *rest]


def greedy(model: PreTrainedModel, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return out[0, len(prompt) :].tolist()


def decoded(spec: Speculator, prompt: list[int], new: int, **arguments: Any) -> Request:
    request = spec.engine.submit(prompt, max_new_tokens=new, **arguments)
    spec.engine.run()
    return request


def shared_beginning(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def read_and_reused(request: Request) -> tuple[int, int]:
    return request.stats.prefill_tokens, request.stats.reused_tokens


def assert_taken_over(request: Request, known: int) -> None:
    """The KV of the first ``known`` tokens was there, and the rest was read, if only, of the last one, by a step."""
    unread = len(request.prompt) - sum(read_and_reused(request))
    assert request.stats.reused_tokens == known
    assert unread in ((0, 1) if known else (0,))
    # Prefill emits the first token, if it comes to the prompt's end.
    assert len(request.new_tokens) - request.stats.emitted_tokens == 1 - unread


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """KV that went from slot to slot: (source, target, tokens)."""
    made: list[tuple[int, int, int]] = []
    copy = Arena.copy_text_state

    def noted(self: Arena, source: int, target: int, count: int) -> None:
        made.append((source, target, count))
        copy(self, source, target, count)

    monkeypatch.setattr(Arena, "copy_text_state", noted)
    return made


# --- from a slot that is free ------------------------------------------------------------------------------------

FAMILIES = [("llama", "none"), ("llama", "ngram"), ("llama", "early_exit")]
# Attention of the model's own; sliding windows with and without a soft cap.
FAMILIES += [("bloom", "early_exit"), ("gptj", "ngram"), ("mistral", "early_exit"), ("gemma2", "ngram")]


def of_family(name: str) -> PreTrainedModel:
    return tiny_llama(vocab=VOCAB) if name == "llama" else model_of(name)


@pytest.mark.parametrize(("family", "mode"), FAMILIES)
def test_a_chat_reads_only_what_is_new(family: str, mode: str, copies: list[tuple[int, int, int]]) -> None:
    """Of the reply, the last token was emitted and never read: it has no KV yet."""
    model = of_family(family)
    spec = wrap(model, mode)
    assert spec.route == ("eager" if family in ("bloom", "gptj") else "attention")
    text, known, slots = prompt(30, seed=1), 0, []
    for turn, (new, question) in enumerate([(20, 12), (1, 1), (9, 40), (5, 3)]):
        request = decoded(spec, text, new)
        assert request.new_tokens == greedy(model, text, new), f"turn {turn}"
        assert_taken_over(request, known)
        slots.append(request.slot)
        text = text + request.new_tokens + prompt(question, seed=2 + turn)
        known = len(text) - question - 1
    assert len(set(slots)) == 1 and not copies, "the KV stayed where it was"


def test_a_text_that_goes_on_otherwise_is_copied_as_far_as_it_is_the_same(
    spec: Speculator, model: PreTrainedModel, copies: list[tuple[int, int, int]]
) -> None:
    first = decoded(spec, prompt(50, seed=1), 10)
    text = [*first.prompt[:31], (first.prompt[31] + 1) % VOCAB, 4, 5]
    request = decoded(spec, text, 10)
    assert read_and_reused(request) == (3, 31)
    assert copies == [(first.slot, request.slot, 31)] and first.slot != request.slot
    assert request.new_tokens == greedy(model, text, 10)
    # Both are known now.
    for former in (first, request):
        longer = [*former.prompt, *former.new_tokens, 7]
        again = decoded(spec, longer, 4)
        assert read_and_reused(again) == (2, len(longer) - 2)
        assert again.new_tokens == greedy(model, longer, 4)


def test_the_longest_beginning_wins(spec: Speculator) -> None:
    text = prompt(60, seed=1)
    for length in (20, 40, 30):
        decoded(spec, [*text[:length], 120 + length // 10], 1)
    assert read_and_reused(decoded(spec, text, 1)) == (20, 40)


def test_only_the_beginning_counts(spec: Speculator) -> None:
    text = prompt(40, seed=1)
    decoded(spec, text, 5)
    for other in ([9, *text], text[1:], [10, *text[1:]]):
        assert read_and_reused(decoded(spec, other, 5)) == (len(other), 0)


def test_the_end_of_a_text_that_an_eos_or_a_stop_ended(model: PreTrainedModel) -> None:
    """The whole model drafts, so a step computes KV behind the token that became the last one; that is not taken."""
    spec = wrap(model, "early_exit", exit_layer=2)
    text = prompt(20, seed=1)
    new = greedy(model, text, 12)
    assert new[6] not in new[:6]
    ends: list[tuple[dict[str, Any], int]] = [
        # Cut off in the graph, which counts the newest token as one without KV.
        ({"eos_token_id": new[6]}, 26),
        # Cut off by the host, in the middle of what the step emitted.
        ({"stopping_criteria": lambda ids, scores: ids[0, -1] == new[6]}, 27),
    ]
    for arguments, known in ends:
        forget(spec)
        request = decoded(spec, text, 12, **arguments)
        assert request.new_tokens == new[:7]
        other = [*text, *new[:7], (new[7] + 1) % VOCAB, 5]
        again = decoded(spec, other, 12)
        assert read_and_reused(again) == (len(other) - known, known)
        assert again.new_tokens == greedy(model, other, 12)


# --- from a slot that runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "mode"), FAMILIES)
def test_a_running_text_lends_its_beginning(family: str, mode: str, copies: list[tuple[int, int, int]]) -> None:
    model = of_family(family)
    spec = wrap(model, mode)
    running = admitted(spec.engine, prompt(30, seed=1), max_new_tokens=60)
    while len(running.new_tokens) < 12:
        spec.engine.step()
    begun = [*running.prompt, *running.new_tokens[:6]]
    # Another continuation of its text, and its text as it stands, whose last token has no KV yet.
    branch = spec.engine.submit([*begun, (running.new_tokens[6] + 1) % 100, 7, 8], max_new_tokens=20)
    whole = spec.engine.submit([*running.prompt, *running.new_tokens], max_new_tokens=20)
    spec.engine.step()
    assert not running.finished
    assert read_and_reused(branch) == (3, len(begun))
    assert read_and_reused(whole) == (0, len(whole.prompt) - 1)
    assert [copied[0] for copied in copies] == [running.slot] * 2
    assert len({running.slot, branch.slot, whole.slot}) == 3
    spec.engine.run()
    for request in (running, branch, whole):
        assert request.new_tokens == greedy(model, request.prompt, request.params.max_new_tokens)


def test_a_prompt_that_is_still_being_read_lends_what_was_read(spec: Speculator, model: PreTrainedModel) -> None:
    """The one in front is read first; the one behind gets all of it at once."""
    text = prompt(200, seed=1)
    first = spec.engine.submit(text, max_new_tokens=5)
    second = spec.engine.submit([*text[:150], 3, 4], max_new_tokens=5)
    spec.engine.run()
    assert read_and_reused(first) == (200, 0)
    assert read_and_reused(second) == (2, 150)
    for request in (first, second):
        assert request.new_tokens == greedy(model, request.prompt, 5)


@pytest.mark.parametrize(("family", "mode"), FAMILIES)
def test_identical_prompts_are_read_once(family: str, mode: str) -> None:
    model = of_family(family)
    spec = wrap(model, mode)
    text = prompt(45, seed=1)
    requests = [spec.engine.submit(text, max_new_tokens=20) for _ in range(MAX_BATCH + 2)]
    spec.engine.run()
    assert [read_and_reused(request) for request in requests] == [(45, 0)] + [(0, 44)] * (MAX_BATCH + 1)
    expected = greedy(model, text, 20)
    assert all(request.new_tokens == expected for request in requests)
    assert (spec.stats.prefill_tokens, spec.stats.reused_tokens) == (45, 44 * (MAX_BATCH + 1))
    # The first step of a follower reads its last token, and its tokens are a step's.
    assert requests[0].stats.emitted_tokens == 19
    assert all(request.stats.emitted_tokens == 20 for request in requests[1:])


def test_a_prompt_of_one_token_is_read_each_time(spec: Speculator, model: PreTrainedModel) -> None:
    for _ in range(2):
        request = decoded(spec, [5], 6)
        assert read_and_reused(request) == (1, 0)
        assert request.new_tokens == greedy(model, [5], 6)


def test_continuations_of_one_prompt_by_generate(spec: Speculator, model: PreTrainedModel) -> None:
    ids = torch.tensor([prompt(30, seed=1)])
    output = spec.generate(ids, num_return_sequences=3, max_new_tokens=9)
    assert output.tolist() == [[*prompt(30, seed=1), *greedy(model, prompt(30, seed=1), 9)]] * 3
    assert [(stats.prefill_tokens, stats.reused_tokens) for stats in spec.stats.requests] == [(30, 0), (0, 29), (0, 29)]


# --- which slot is taken -----------------------------------------------------------------------------------------


def test_the_least_recently_used_text_is_given_up(spec: Speculator) -> None:
    texts = [prompt(20, seed) for seed in range(1, 6)]
    for text in texts[:3]:
        decoded(spec, text, 4)
    # The first one is used again, so the second one is the oldest.
    used = decoded(spec, [*texts[0], 9], 4)
    assert used.stats.reused_tokens == 20
    decoded(spec, texts[3], 4)
    assert [known(spec, text) for text in texts] == [20, 0, 20, 20, 0]
    decoded(spec, texts[4], 4)
    assert [known(spec, text) for text in texts] == [20, 0, 0, 20, 20]


def known(spec: Speculator, text: list[int]) -> int:
    """For how many tokens of ``text`` there is KV."""
    slots = spec.engine.slots
    assert not slots.owned
    return max(shared_beginning(text, held) for held in slots._free.values())


def test_unrelated_prompts_take_the_slots_in_turn(spec: Speculator) -> None:
    slots = [decoded(spec, prompt(10, seed), 3).slot for seed in range(1, 10)]
    assert slots == slots[:3] * 3 and sorted(slots[:3]) == [0, 1, 2]


def test_a_slot_without_a_text_is_taken_first(model: PreTrainedModel) -> None:
    spec = wrap(model)
    first = decoded(spec, prompt(20, seed=1), 4)
    other = decoded(spec, prompt(20, seed=2), 4)
    third = decoded(spec, prompt(20, seed=3), 4)
    assert sorted([first.slot, other.slot, third.slot]) == [0, 1, 2]


def test_a_system_prompt_that_all_share_stays_known(spec: Speculator, model: PreTrainedModel) -> None:
    """Whether they come one after another or all at once, and with others in between."""
    system = prompt(40, seed=1)
    decoded(spec, [*system, 5, 6], 6)
    for question in range(2 * MAX_BATCH):
        decoded(spec, prompt(15, seed=50 + question), 4)
        text = [*system, *prompt(7, seed=20 + question)]
        request = decoded(spec, text, 6)
        assert read_and_reused(request) == (7, 40)
        assert request.new_tokens == greedy(model, text, 6)
    requests = [
        spec.engine.submit([*system, *prompt(7, seed=30 + question)], max_new_tokens=6)
        for question in range(2 * MAX_BATCH)
    ]
    spec.engine.run()
    for request in requests:
        assert read_and_reused(request) == (7, 40)
        assert request.new_tokens == greedy(model, request.prompt, 6)


# --- when nothing is taken over ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"prefix_reuse": False}, {"deterministic": True}], ids=str)
def test_nothing_is_taken_over_where_it_is_switched_off(model: PreTrainedModel, options: dict[str, bool]) -> None:
    """KV of a step and of a chunk differ in their last bits, which ``deterministic`` promises not to show."""
    spec = wrap(model, **options)
    assert not spec.engine.prefix_reuse
    assert "prefix reuse off" in spec.explain()
    text = prompt(30, seed=1)
    running = admitted(spec.engine, text, max_new_tokens=30)
    again = spec.engine.submit(text, max_new_tokens=5)
    spec.engine.run()
    third = decoded(spec, [*text, *again.new_tokens, 5], 5)
    for request in (running, again, third):
        assert read_and_reused(request) == (len(request.prompt), 0)
        assert request.new_tokens == greedy(model, request.prompt, request.params.max_new_tokens)
    assert spec.stats.reused_tokens == 0


def test_check_reads_every_prompt(spec: Speculator) -> None:
    text = prompt(30, seed=1)
    decoded(spec, text, 5)
    for reference in ("plain", "transformers"):
        spec.stats.reset()
        assert spec.check([text, text], max_new_tokens=8, reference=reference)  # type: ignore[arg-type]
        assert spec.stats.reused_tokens == 0


def in_place(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.mul_(-1)


def behind_torchs_back(weight: torch.Tensor) -> None:
    weight.data.mul_(-1)


@pytest.mark.parametrize("change", [in_place, behind_torchs_back])
def test_nothing_is_taken_over_when_weights_were_changed(change: Callable[[torch.Tensor], None]) -> None:
    model = tiny_llama(vocab=VOCAB)
    spec = wrap(model)
    text = prompt(30, seed=1)
    decoded(spec, text, 5)
    running = admitted(spec.engine, prompt(30, seed=2), max_new_tokens=50)
    before = greedy(model, text, 5)
    change(model.model.layers[0].self_attn.v_proj.weight)
    for known in (text, running.prompt):
        request = spec.engine.submit(known, max_new_tokens=5)
        while not request.finished:
            spec.engine.step()
        assert read_and_reused(request) == (30, 0)
        assert request.new_tokens == greedy(model, known, 5)
    assert greedy(model, text, 5) != before
    # Of the new weights' own KV, all is.
    assert read_and_reused(decoded(spec, [*text, 5, 6], 5)) == (2, 30)


# --- requests that do not end by themselves ----------------------------------------------------------------------


def test_cancelled_while_its_prompt_is_read_it_leaves_what_was_read(spec: Speculator, model: PreTrainedModel) -> None:
    text = prompt(220, seed=1)
    cancelled = spec.engine.submit(text, max_new_tokens=5)
    spec.engine.step()
    assert cancelled.stats.prefill_tokens == 128
    cancelled.cancel()
    spec.engine.run()
    for again, known in (([*text[:100], 3], 100), ([*text[:150], 3, 4], 128), (text, 150)):
        request = decoded(spec, again, 5)
        assert_taken_over(request, known)
        assert request.new_tokens == greedy(model, again, 5)


def test_cancelled_before_a_chunk_was_read_it_leaves_nothing(spec: Speculator, model: PreTrainedModel) -> None:
    running = admitted(spec.engine, prompt(20, seed=2), max_new_tokens=50)
    # The budget goes to the first one: the second has a slot already, or none; of it nothing was read.
    for request in [spec.engine.submit(prompt(64, seed), max_new_tokens=5) for seed in (3, 4)]:
        spec.engine.step()
        request.cancel()
    spec.engine.run()
    for seed in (3, 4):
        request = decoded(spec, prompt(64, seed), 5)
        assert request.new_tokens == greedy(model, prompt(64, seed), 5)
    assert running.new_tokens == greedy(model, running.prompt, 50)


def test_cancelled_while_it_runs_it_leaves_its_text(model: PreTrainedModel) -> None:
    spec = wrap(model, "early_exit", exit_layer=2)
    cancelled = admitted(spec.engine, prompt(20, seed=1), max_new_tokens=50)
    for _ in range(4):
        spec.engine.step()
    cancelled.cancel()
    text = [*cancelled.prompt, *cancelled.new_tokens]
    assert len(text) == 20 + 1 + 4 * 4
    request = decoded(spec, [*text, 5], 9)
    assert read_and_reused(request) == (2, len(text) - 1)
    assert request.new_tokens == greedy(model, [*text, 5], 9)


class Breaks:
    """A streamer that raises when it gets its n-th value."""

    def __init__(self, at: int) -> None:
        self.left = at

    def put(self, value: torch.Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("the listener is gone")

    def end(self) -> None:
        pass


@pytest.mark.parametrize("at", [1, 2, 5])
def test_of_a_request_that_failed_nothing_stays(spec: Speculator, model: PreTrainedModel, at: int) -> None:
    """Neither in the arena nor known; who had a copy goes on with that."""
    text = prompt(30, seed=1)
    failing = spec.engine.submit(text, max_new_tokens=20, streamer=Breaks(at))
    follower = spec.engine.submit([*text, 4, 5], max_new_tokens=20)
    spec.engine.run()
    with pytest.raises(RequestFailed):
        failing.result()
    for name, tensor in spec.arena.layout.tensors.items():
        if tensor.follows_text:
            assert not spec.arena[name][failing.slot].any() or failing.slot == follower.slot, name
    # What was read before it failed was lent to the other, if both ran at a time.
    assert read_and_reused(follower) == ((2, 30) if at == 5 else (32, 0))
    assert follower.new_tokens == greedy(model, follower.prompt, 20)
    other = decoded(spec, [*text[:-1], 9, 9], 20)
    assert other.stats.reused_tokens == 29, "known by the follower alone"
    assert other.new_tokens == greedy(model, other.prompt, 20)


def test_a_failed_request_alone_is_forgotten(spec: Speculator, model: PreTrainedModel) -> None:
    text = prompt(30, seed=1)
    failed = decoded(spec, text, 20, streamer=Breaks(5))
    assert failed.finish_reason == "error" and failed.stats.prefill_tokens == 30
    kv = [name for name, tensor in spec.arena.layout.tensors.items() if tensor.follows_text]
    assert kv and not any(spec.arena[name][failed.slot].any() for name in kv)
    again = decoded(spec, text, 20)
    assert read_and_reused(again) == (30, 0)
    assert again.new_tokens == greedy(model, text, 20)


# --- conversations at random -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "mode"), FAMILIES)
def test_conversations_at_random(family: str, mode: str, copies: list[tuple[int, int, int]]) -> None:
    """Prompts that begin like any earlier text, whether it has ended, runs or was cancelled: all texts are exact."""
    model, rng = of_family(family), random.Random(7)
    spec = wrap(model, mode, prefill_budget=24)
    engine = spec.engine
    requests: list[Request] = []
    cancelled = 0
    for _ in range(30):
        base: list[int] = []
        if requests and rng.random() < 0.8:
            former = rng.choice(requests[-4:])
            base = [*former.prompt, *former.new_tokens]
            base = base[: rng.randint(0, len(base))]
        text = (base + rng.choices(range(VOCAB if family == "llama" else 100), k=rng.randint(1, 20)))[-150:]
        requests.append(engine.submit(text, max_new_tokens=rng.randint(1, 12)))
        for _ in range(rng.randint(0, 6)):
            engine.step()
            if rng.random() < 0.05 and engine.running:
                cancelled += rng.choice(engine.running).cancel()
    engine.run()
    for request in requests:
        expected = greedy(model, request.prompt, request.params.max_new_tokens)
        assert request.error is None
        if request.finish_reason == "cancelled":
            assert request.new_tokens == expected[: len(request.new_tokens)]
        else:
            assert request.new_tokens == expected
            assert_taken_over(request, request.stats.reused_tokens)
    assert cancelled > 0
    in_place = [request for request in requests if request.stats.reused_tokens]
    assert len(copies) > 3 and len(in_place) > len(copies), "both ways were taken"


# --- alone -------------------------------------------------------------------------------------------------------


PLACES = 24


class Idle:
    """A driver that nobody waits with."""

    def ended(self, request: Request) -> None: ...

    def wait(self, request: Request, seen: int, timeout: float | None = None) -> None: ...

    async def wait_async(self, request: Request, seen: int) -> None: ...


def small_arena() -> Arena:
    specs = [*core_state(8), StateSpec("kv", (N, S, 2), torch.int64, reset=False)]
    layout = resolve_layout(specs, max_batch=3, max_len=PLACES, max_draft_len=1, max_width=2, vocab_size=8)
    return Arena(layout, torch.device("cpu"))


def kv_of(text: list[int]) -> list[list[int]]:
    """Stands in for KV: it depends on the place and on all tokens up to it."""
    return [[place, hash(tuple(text[: place + 1]))] for place in range(len(text))]


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_a_slot_holds_the_longest_known_beginning_and_nothing_wrong(data: st.DataObject) -> None:
    """Any order of takes, reads, tokens and ends, over a small alphabet: what a slot is said to hold is what is there,
    no other slot knows more, and of what is known as little as possible is given up."""
    arena = small_arena()
    weights = [0]
    slots = Slots(arena, lambda: weights[0], reuse=True, clear=False)
    running: list[Request] = []
    # Slots in the order in which they became free, with what each one holds of which weights.
    free: dict[int, tuple[int, list[int]]] = {slot: (0, []) for slot in range(3)}
    born: dict[Request, int] = {}

    def write(request: Request, count: int) -> None:
        text = request.prompt + request.new_tokens
        for place in range(request.cached, min(request.cached + count, len(text))):
            arena["kv"][request.slot, place] = torch.tensor(kv_of(text)[place])
        request.cached = min(request.cached + count, len(text))

    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["take", "take", "read", "add", "end", "end", "fail", "change"]))
        if action == "take" and free:
            text = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=PLACES - 4))
            known = [(texts, free_slot) for free_slot, texts in free.items()]
            known += [((born[r], (r.prompt + r.new_tokens)[: r.cached]), r.slot) for r in running]
            most = max((shared_beginning(text[:-1], held) for (of, held), _ in known if of == weights[0]), default=0)
            request = Request(
                Idle(),
                text,
                Params(max_new_tokens=4, eos=()),
                Listener(torch.tensor([text]), 4, None, make_criteria(None, None, None)),
                RequestStats(1),
                Records(Wanted(), arena),
            )
            slots.take(request)
            assert request.cached == request.stats.reused_tokens == most
            assert arena["kv"][request.slot, :most].tolist() == kv_of(text[:most])
            assert arena["tokens"][request.slot, : len(text)].tolist() == text
            taken_from = free.pop(request.slot)
            if most and taken_from == (weights[0], text[:most]):
                pass  # Its own text goes on: nothing is given up.
            elif any(not held for _, held in free.values()):
                assert not taken_from[1], "an empty slot was left"
            elif most:
                whole = [slot for slot, held in free.items() if held == (weights[0], text[:most])]
                assert not whole, "one whose text goes on was left"
            running.append(request)
            born[request] = weights[0]
        elif action == "read" and running:
            write(data.draw(st.sampled_from(running)), data.draw(st.integers(1, 9)))
        elif action == "add" and running:
            request = data.draw(st.sampled_from(running))
            if request.cached >= len(request.prompt) - 1 and len(request.new_tokens) < 4:
                request.add([data.draw(st.integers(0, 1))])
                write(request, len(request.prompt) + len(request.new_tokens) - 1 - request.cached)
        elif action in ("end", "fail") and running:
            request = running.pop(data.draw(st.integers(0, len(running) - 1)))
            request.end("error" if action == "fail" else "eos", RuntimeError() if action == "fail" else None)
            slots.give_back(request)
            text = (request.prompt + request.new_tokens)[: request.cached]
            free[request.slot] = (born[request], [] if action == "fail" else text)
            if action == "fail":
                assert not arena["kv"][request.slot].any()
        elif action == "change":
            weights[0] += 1
        assert slots.free == len(free)
        assert slots.owned == running or sorted(map(id, slots.owned)) == sorted(map(id, running))


def test_reset_keeps_kv_and_clearing_takes_what_is_behind_the_text() -> None:
    """A new owner that reads dead places finds none of a former one's."""
    for clear in (False, True):
        arena = small_arena()
        slots = Slots(arena, lambda: 0, reuse=True, clear=clear)
        arena["kv"].fill_(7)
        request = Request(
            Idle(),
            [1, 2, 3],
            Params(max_new_tokens=4, eos=()),
            Listener(torch.tensor([[1, 2, 3]]), 4, None, make_criteria(None, None, None)),
            RequestStats(1),
            Records(Wanted(), arena),
        )
        slots.take(request)
        assert bool(arena["kv"][request.slot].any()) is not clear
        assert (arena["kv"][[slot for slot in range(4) if slot != request.slot]] == 7).all()
