"""The suffix drafter: its trie against a search through the whole text, and the mode in steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import admitted, cancel_all, greedy, random_prompt, tiny_llama
from transformers import LlamaForCausalLM

import speccompile
from speccompile.errors import InvalidOption
from speccompile.modes.suffix_trie import Speculation, Trie, reference

USUAL = Speculation(8, 1.0, 0.0, 0.1)


def trie(room: int, depth: int) -> Trie:
    nodes, i32 = room * depth + 1, torch.int32
    shapes = ((2,), (depth + 1,), (4, nodes), (2 * nodes,))
    return Trie(*(torch.zeros(shape, dtype=i32) for shape in shapes))


def read(text: list[int], depth: int) -> Trie:
    filled = trie(len(text), depth)
    for token in text:
        filled.add(token)
    return filled


@settings(deadline=None)
@given(
    text=st.lists(st.integers(0, 3), max_size=60),
    longest=st.integers(1, 7),
    depth=st.integers(2, 12),
    factor=st.sampled_from([0.5, 1.0, 3.0]),
    offset=st.sampled_from([-1.0, 0.0, 2.0]),
    least=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_the_trie_proposes_what_a_search_does(
    text: list[int], longest: int, depth: int, factor: float, offset: float, least: float
) -> None:
    speculation = Speculation(depth, factor, offset, least)
    # At once, and token by token with proposals in between: reading them must not change anything.
    filled = trie(len(text), depth)
    for end, token in enumerate(text, 1):
        filled.add(token)
        assert filled.propose(longest, speculation) == reference(text[:end], longest, speculation)


def test_by_hand() -> None:
    """Behind 1 2 came 3 twice and 4 once; the newest 1 2 has nothing behind it."""
    text = [1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1, 2]
    assert read(text, 8).propose(7, Speculation(8, 1.0, 0.0, 0.1)) == ([3, 7], [0.5, 0.25])
    assert read(text, 8).propose(7, Speculation(8, 1.0, 0.0, 0.3)) == ([3], [0.5])
    assert read([1, 2, 3], 8).propose(7, USUAL) == ([], [])
    # One token expects 3/4, two expect 2/3 and 1/3, three expect 1/2.
    assert read([5, 5, 5, 5], 8).propose(7, USUAL)[0] == [5, 5]


def test_a_token_costs_no_more_in_a_longer_text() -> None:
    """Nodes are visited at most depth times a token, and there are no more of them."""

    class Counted(Trie):
        visits = 0

        def _child(self, parent: int, token: int) -> int:
            self.visits += 1
            return super()._child(parent, token)

    text = random_prompt(600, seed=3, vocab=5)
    shapes = ((2,), (9,), (4, 600 * 8 + 1), (2 * (600 * 8 + 1),))
    filled = Counted(*(torch.zeros(shape, dtype=torch.int32) for shape in shapes))
    seen = []
    for token in text:
        before = filled.visits
        filled.add(token)
        seen.append(filled.visits - before)
    assert max(seen) == 8 and filled._used[1] <= 600 * 8


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


OPTIONS = {"tiers": (0, 1, 3), "max_batch": 3, "max_len": 96, "backend": "eager", "max_depth": 8}


def test_the_text_is_that_of_transformers_and_state_that_of_a_search(model: LlamaForCausalLM) -> None:
    spec = speccompile.wrap(model, "suffix", **OPTIONS)
    engine, arena = spec.engine, spec.arena
    engine.prepare("greedy", watched=True)
    before = arena.fingerprint()
    prompts = [random_prompt(9, seed, vocab=6) for seed in range(3)]
    requests = [engine.submit(prompt, max_new_tokens=40) for prompt in prompts]
    speculation = Speculation(8, 1.0, 0.0, 0.1)
    while not engine.idle:
        engine.step()
        for request in engine.running:
            if not request.new_tokens:
                continue
            text = request.prompt + request.new_tokens
            drafts, scores = reference(text, 3, speculation)
            count = int(arena["draft_lens"][request.slot])
            assert count == max(0, min(len(drafts), request.room - 1))
            assert arena["draft_tokens"][request.slot, :count].tolist() == drafts[:count]
            assert arena["draft_score"][request.slot, :count].tolist() == pytest.approx(scores[:count])
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.new_tokens == greedy(model, prompt, 40)
    assert spec.stats.accepted_tokens > 0
    assert arena.fingerprint() == before


def test_a_slot_forgets_its_former_owner(model: LlamaForCausalLM) -> None:
    spec = speccompile.wrap(model, "suffix", **(OPTIONS | {"max_batch": 1}))
    prompt = random_prompt(9, 5, vocab=6)
    first = spec.engine.submit(prompt, max_new_tokens=20)
    first.result()
    other = spec.engine.submit(random_prompt(9, 6, vocab=6), max_new_tokens=20)
    other.result()
    again = admitted(spec.engine, prompt, max_new_tokens=20)
    assert int(spec.arena["suffix_used"][again.slot, 0]) == len(prompt) + len(again.new_tokens)
    cancel_all(spec.engine)


def test_with_the_cost_policy_scores_decide(model: LlamaForCausalLM) -> None:
    spec = speccompile.wrap(model, "suffix", policy="cost", **OPTIONS)
    prompt = random_prompt(9, 2, vocab=6)
    assert spec.generate(torch.tensor([prompt]), max_new_tokens=40)[0, 9:].tolist() == greedy(model, prompt, 40)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_depth": 1}, "max_depth"),
        ({"max_depth": 1000}, "max_depth"),
        ({"factor": -1}, "factor"),
        ({"offset": "much"}, "offset"),
        ({"min_probability": 2}, "min_probability"),
    ],
)
def test_options_that_are_refused(model: LlamaForCausalLM, options: dict[str, object], name: str) -> None:
    with pytest.raises(InvalidOption, match=f"mode 'suffix': {name}="):
        speccompile.wrap(model, "suffix", max_len=64, backend="eager", **options)
