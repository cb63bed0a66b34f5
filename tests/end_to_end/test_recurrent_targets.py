"""Targets with recurrent state: after any steps state and text are those of plain decoding."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import speccompile
from speccompile import Speculator, Tree
from speccompile.errors import InvalidOption, InvalidTiers, UnsupportedModel
from speccompile.graph.state import ABSORBED
from speccompile.runtime.request import Request
from support.dice import Dice
from support.errors import raises
from support.families import model_of
from support.our_kernels import our_kernels
from support.tiny import greedy

TIERS = (0, 1, 3)
SLOTS, NEW = 3, 16
#: A convolution alone; the delta rule; Mamba-2, and Mamba, which has no attention at all. As torch computes the last
#: numbers of a tensor in another way than whole vectors, there are whole vectors of all that depends on the width.
#: All tiers of the last one run one shape, so that it reuses no prompts.
FAMILIES: dict[str, dict[str, int]] = {
    "lfm2": {},
    "qwen3_next": {"linear_num_value_heads": 32},
    "bamba": {"mamba_n_heads": 32, "mamba_d_head": 2, "mamba_d_state": 16},
    "mamba": {},
}


class Drafter:
    """Drafts some right tokens of the texts that it knows, and then others."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.texts: list[list[int]] = []
        self.wrong: Sequence[int] = range(5, 100)
        self.mistakes = 0

    def __call__(self, tokens: list[int], draft_len: int) -> list[int]:
        text = next((text for text in self.texts if text[: len(tokens)] == tokens), tokens)
        right = text[len(tokens) : len(tokens) + self.random.randint(0, draft_len)]
        self.mistakes += draft_len - len(right)
        return [*right, *self.random.choices(self.wrong, k=draft_len - len(right))]


@dataclass
class Wrapped:
    """A family's tiny model, whose drafter knows what comes next."""

    model: PreTrainedModel
    drafter: Drafter
    spec: Speculator
    texts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    #: By prompt, the state after each step without drafts, by how many tokens it has absorbed.
    plain: dict[tuple[int, ...], dict[int, list[torch.Tensor]]] = field(default_factory=dict)

    def expected(self, prompt: list[int]) -> list[int]:
        """transformers' own text, which the drafter knows from now on."""
        key = tuple(prompt)
        if key not in self.texts:
            self.texts[key] = greedy(self.model, prompt, NEW)
            self.drafter.texts.append([*prompt, *self.texts[key]])
        return self.texts[key]

    def decode_plainly(self, texts: list[list[int]]) -> None:
        """Fill ``plain`` for prompts that are not in it yet, and check their texts."""
        new = [prompt for prompt in texts if tuple(prompt) not in self.plain]

        def note(request: Request) -> None:
            absorbed, state = self.state_of(request)
            self.plain.setdefault(tuple(request.prompt), {})[absorbed] = state

        self.spec.set_tier(0)
        with self.nothing_reused():
            for first in range(0, len(new), SLOTS):
                for request in stepped(self, new[first : first + SLOTS], note):
                    assert request.new_tokens == self.expected(request.prompt)
        # Of a prompt that is known but for its last token the first step reads that one.
        for prompt in new:
            if len(prompt) > 1 and self.spec.engine.prefix_reuse:
                self.plain[tuple(prompt)][len(prompt) - 1] = self.fresh_state(prompt[:-1])

    @contextlib.contextmanager
    def nothing_reused(self) -> Iterator[None]:
        slots = self.spec.engine.slots
        before, slots._reuse = slots._reuse, False
        yield
        slots._reuse = before

    def fresh_state(self, text: list[int]) -> list[torch.Tensor]:
        """The state after ``text`` was read as a prompt."""
        with self.nothing_reused():
            request = self.spec.engine.submit(text, max_new_tokens=NEW)
            while not (request.new_tokens or request.finished):
                self.spec.engine.step()
        absorbed, state = self.state_of(request)
        assert absorbed == len(text)
        request.cancel()
        return state

    def state_of(self, request: Request) -> tuple[int, list[torch.Tensor]]:
        """How many tokens the state of a request's slot has absorbed, and what it is."""
        arena, slot = self.spec.engine.arena, request.slot
        absorbed, found = int(arena[ABSORBED][slot]), []
        for name in arena:
            if name.startswith(("delta_", "scan_")) and not name.endswith("_kept"):
                found.append(arena[name][slot].clone())
            elif name.startswith("conv_"):
                places = arena[name].shape[1]
                window = places - self.spec.engine.arena.layout.max_width
                settled = [p % places for p in range(max(0, absorbed - window), absorbed)]
                found.append(arena[name][slot, settled].clone())
        return absorbed, found


@pytest.fixture(scope="module", autouse=True)
def backend() -> Iterator[None]:
    with our_kernels():
        yield
    wrapped.cache_clear()


@functools.cache
def wrapped(name: str) -> Wrapped:
    model, drafter = model_of(name, **FAMILIES[name]), Drafter()
    spec = speccompile.wrap(
        model,
        "user_provided",
        draft=drafter,
        host=True,
        tiers=TIERS,
        max_batch=SLOTS,
        max_len=60,
        backend="ours",
        deterministic=True,
        policy=Dice(TIERS),
    )
    return Wrapped(model, drafter, spec)


@pytest.fixture(params=FAMILIES)
def target(request: pytest.FixtureRequest) -> Iterator[Wrapped]:
    yield from idle(request.param)


@pytest.fixture(params=[name for name in FAMILIES if name != "mamba"])
def reusing(request: pytest.FixtureRequest) -> Iterator[Wrapped]:
    if not wrapped(request.param).spec.engine.prefix_reuse:
        pytest.skip("the bits of torch's own ops between ours depend on the width here: all steps run one shape")
    yield from idle(request.param)


def idle(name: str) -> Iterator[Wrapped]:
    found = wrapped(name)
    found.spec.engine.policy = Dice(TIERS)
    yield found
    assert found.spec.engine.idle


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    choose = random.Random(seed)
    return [choose.choices(range(5, 100), k=choose.choice([1, 2, 5, 11, 30])) for _ in range(count)]


def stepped(target: Wrapped, texts: list[list[int]], see: Callable[[Request], None]) -> list[Request]:
    """All of ``texts`` at once, each request looked at after every step."""
    engine = target.spec.engine
    requests = [engine.submit(prompt, max_new_tokens=NEW) for prompt in texts]
    while any(not request.finished for request in requests):
        engine.step()
        for request in requests:
            if not request.finished and request.slot is not None and request.new_tokens:
                see(request)
    return requests


def test_state_after_every_step_is_that_of_plain_decoding_bit_for_bit(target: Wrapped) -> None:
    texts, seen = prompts(SLOTS, seed=3), 0
    target.decode_plainly(texts)

    def compare(request: Request) -> None:
        nonlocal seen
        absorbed, state = target.state_of(request)
        assert all(map(torch.equal, state, target.plain[tuple(request.prompt)][absorbed]))
        seen += 1

    target.spec.engine.policy = Dice(TIERS, seed=1)
    target.spec.stats.reset()
    for request in stepped(target, texts, compare):
        assert request.new_tokens == target.expected(request.prompt)
    assert seen > NEW and 0 < target.spec.stats.accepted_tokens < target.spec.stats.draft_tokens


Move = tuple[str, int, int]
#: A request of the n-th known prompt for so many tokens, a step of the n-th tier, the n-th request is cancelled.
moves: st.SearchStrategy[list[Move]] = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 4), st.integers(1, NEW)),
        *[st.tuples(st.just("step"), st.integers(0, len(TIERS) - 1), st.integers(1, 3))] * 3,
        st.tuples(st.just("cancel"), st.integers(0, 5), st.just(0)),
    ),
    min_size=6,
    max_size=30,
)


@pytest.mark.parametrize("name", FAMILIES)
def test_state_after_any_moves_is_that_of_plain_decoding_and_of_a_fresh_prompt(name: str) -> None:
    target, known = wrapped(name), [[9], *prompts(1, seed=9)]
    engine = target.spec.engine
    # Two that go on from the end of the first one's text, one that leaves it before.
    known += [[9, *target.expected([9])[:count], *tail] for count, tail in ((NEW, [7, 8]), (9, [6]), (2, [7] * 20))]
    target.decode_plainly(known)

    reused: list[Request] = []

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(moves=moves)
    def holds(moves: list[Move]) -> None:
        target.drafter.random.seed(0)
        requests: list[Request] = []
        newest: list[tuple[list[int], list[torch.Tensor]]] = []
        for move, which, count in moves:
            if move == "submit":
                requests.append(engine.submit(known[which], max_new_tokens=count))
            elif move == "cancel" and requests:
                requests[which % len(requests)].cancel()
            elif move == "step":
                target.spec.set_tier(TIERS[which])
                for _ in range(count):
                    engine.step()
            newest = []
            for request in requests:
                if not request.finished and request.slot >= 0 and request.new_tokens:
                    absorbed, state = target.state_of(request)
                    assert all(map(torch.equal, state, target.plain[tuple(request.prompt)][absorbed]))
                    newest.append(((request.prompt + request.new_tokens)[:absorbed], state))
        engine.run()
        reused.extend(request for request in requests if request.stats.reused_tokens)
        for request in requests:
            text = target.expected(request.prompt)[: request.params.max_new_tokens]
            assert request.new_tokens == text[: len(request.new_tokens)]
            assert request.finish_reason == "cancelled" or request.new_tokens == text
        for text, state in newest[:1]:
            for found, fresh in zip(state, target.fresh_state(text), strict=True):
                torch.testing.assert_close(found, fresh)

    holds()
    assert bool(reused) == engine.prefix_reuse


def test_batches_of_one_to_four_rows_have_the_text_of_transformers(target: Wrapped) -> None:
    """The fourth row waits for a slot."""
    known = prompts(4, seed=10)
    for rows in range(1, 5):
        batch = known[-rows:]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        expected = [target.expected(prompt) for prompt in batch]
        found = target.spec.generate(ids, attention_mask=mask, max_new_tokens=NEW)[:, width:]
        assert found.tolist() == expected


def test_sampled_text_does_not_depend_on_tiers_and_neighbours(target: Wrapped) -> None:
    engine, known = target.spec.engine, prompts(5, seed=11)
    asked = [
        {"ids": prompt, "max_new_tokens": NEW, "do_sample": True, "seed": seed, "temperature": 0.7, "top_k": 20}
        for seed, prompt in enumerate(known)
    ]
    target.spec.set_tier(0)
    expected = []
    for options in asked:
        expected.append(engine.submit(**options))
        engine.run()
    target.drafter.texts += [request.prompt + request.new_tokens for request in expected]
    engine.policy = Dice(TIERS, seed=2)
    target.spec.stats.reset()
    together = [engine.submit(**options) for options in asked]
    engine.run()
    assert [request.new_tokens for request in together] == [request.new_tokens for request in expected]
    assert any(request.new_tokens != target.expected(request.prompt) for request in expected)
    assert 0 < target.spec.stats.accepted_tokens < target.spec.stats.draft_tokens


def test_two_hundred_requests_over_three_slots_have_the_text_of_transformers(target: Wrapped) -> None:
    """Some are cancelled, in the middle of their prompts too."""
    choose, engine, known = random.Random(4), target.spec.engine, prompts(8, seed=5)
    requests = [engine.submit(choose.choice(known), max_new_tokens=choose.randint(1, 8)) for _ in range(200)]
    leaving = choose.sample(requests, 50)
    while not engine.idle:
        engine.step()
        if leaving and choose.random() < 0.3:
            leaving.pop().cancel()
    for request in requests:
        expected = target.expected(request.prompt)[: request.params.max_new_tokens]
        assert request.new_tokens == expected[: len(request.new_tokens)]
        assert request.finish_reason == "cancelled" or request.new_tokens == expected
    assert sum(request.finish_reason == "cancelled" for request in requests) >= 20


def cancelled_halfway(target: Wrapped, prompt: list[int]) -> int:
    """How many tokens of the prompt were read."""
    engine = target.spec.engine
    request = engine.submit(prompt, max_new_tokens=NEW)
    while request.slot < 0 or not engine.arena[ABSORBED][request.slot]:
        engine.step()
    read = int(engine.arena[ABSORBED][request.slot])
    assert 0 < read < len(prompt) and not request.new_tokens
    request.cancel()
    return read


def test_a_prompt_that_is_cancelled_halfway_leaves_nothing(target: Wrapped) -> None:
    engine, choose = target.spec.engine, random.Random(12)
    for _ in range(SLOTS):
        cancelled_halfway(target, choose.choices(range(5, 100), k=44))
    prompt = prompts(1, seed=12)[0]
    expected = target.expected(prompt)
    following = [engine.submit(prompt, max_new_tokens=NEW) for _ in range(SLOTS)]
    engine.run()
    assert all(request.new_tokens == expected for request in following)


def test_a_rejected_draft_that_is_not_a_number_leaves_nothing(target: Wrapped) -> None:
    texts = prompts(SLOTS, seed=6)
    bad = next(token for token in range(5, 100) if all(token not in [*p, *target.expected(p)] for p in texts))
    weight = target.model.get_input_embeddings().weight
    before, target.drafter.wrong, target.drafter.mistakes = weight[bad].clone(), [bad], 0
    with torch.no_grad():
        weight[bad] = torch.nan

    def see(request: Request) -> None:
        assert not any(tensor.isnan().any() for tensor in target.state_of(request)[1])

    try:
        for request in stepped(target, texts, see):
            assert request.new_tokens == target.expected(request.prompt)
        assert target.drafter.mistakes > 10
    finally:
        target.drafter.wrong = range(5, 100)
        with torch.no_grad():
            weight[bad] = before


def test_a_slots_new_owner_sees_nothing_of_the_one_before(target: Wrapped) -> None:
    arena, prompt = target.spec.engine.arena, prompts(1, seed=7)[0]
    for name in arena:
        if name.startswith(("conv_", "delta_", "scan_")):
            arena[name][:SLOTS].fill_(torch.nan)
    arena[ABSORBED][:SLOTS].fill_(7)
    request = target.spec.engine.submit(prompt, max_new_tokens=NEW)
    target.spec.engine.run()
    assert request.new_tokens == target.expected(prompt)


def finished(target: Wrapped, prompt: list[int], new: int = 6) -> Request:
    request = target.spec.engine.submit(prompt, max_new_tokens=new)
    target.spec.engine.run()
    assert request.new_tokens == target.expected(prompt)[:new]
    return request


def test_a_prompt_that_goes_on_from_a_known_end_reuses_the_state(reusing: Wrapped) -> None:
    first = finished(reusing, prompts(1, seed=8)[0][:20])
    for more in ([20], [21, 22, 23]):
        text = first.prompt + first.new_tokens
        slot, first = first.slot, finished(reusing, [*text, *more])
        assert first.stats.reused_tokens == len(text) - 1 and first.slot == slot
    assert "prefix reuse on" in reusing.spec.explain()


def test_a_prompt_that_leaves_a_known_text_after_what_is_absorbed_goes_on_from_a_copy(reusing: Wrapped) -> None:
    reusing.spec.set_tier(0)
    first = finished(reusing, prompts(1, seed=15)[0][:20])
    absorbed, state = reusing.state_of(first)
    shared = (first.prompt + first.new_tokens)[:absorbed]
    second = finished(reusing, [*shared, 101])
    assert second.stats.reused_tokens == absorbed == len(first.prompt) + 4 and second.slot != first.slot
    assert all(map(torch.equal, state, reusing.state_of(first)[1]))


def test_a_prompt_that_leaves_a_known_text_before_its_end_is_read_anew(reusing: Wrapped) -> None:
    first = finished(reusing, prompts(1, seed=13)[0][:20], NEW)
    for prompt in (first.prompt, [*first.prompt, first.new_tokens[0], 11]):
        assert finished(reusing, prompt).stats.reused_tokens == 0


def test_the_state_of_a_prompt_that_was_cancelled_halfway_is_used_again(reusing: Wrapped) -> None:
    prompt = random.Random(14).choices(range(5, 100), k=44)
    read = cancelled_halfway(reusing, prompt)
    assert finished(reusing, prompt).stats.reused_tokens == read


def test_explain_names_recurrences_and_that_prompts_are_read_in_chunks_of_their_own(target: Wrapped) -> None:
    explained = target.spec.explain()
    assert "along with a step" not in explained
    assert f"prefix reuse {'on' if target.spec.engine.prefix_reuse else 'off'}" in explained
    assert "recurrences" in explained and "choose_recurrence" in explained


# --- what is refused ---------------------------------------------------------------------------------


def wrap(mode: str, **options: object) -> Speculator:
    return speccompile.wrap(model_of("lfm2"), mode, max_batch=1, max_len=40, backend="eager", **options)  # type: ignore


def test_trees_are_refused() -> None:
    tiers = (0, Tree.static([(0,), (1,)]))
    with raises(
        InvalidTiers, reason="there are trees, and the model keeps a recurrent state, which follows one path alone"
    ):
        wrap("ngram", tiers=tiers)


def test_drafting_with_the_targets_own_layers_is_refused() -> None:
    with pytest.raises(InvalidOption, match="layers, which keep a recurrent state: drafts would advance it"):
        wrap("early_exit", tiers=(0, 2))
    wrap("early_exit", tiers=(0,)).close()


def test_a_drafter_with_recurrent_state_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="from which the drafts of a drafter cannot be taken back yet"):
        wrap("draft_target", draft=model_of("lfm2"), tiers=(0, 2))
