"""The suffix drafter: its trie by hand, the mode in steps, and what it refuses.

``ops/cpu/test_suffix_ops.py`` holds both forms of its ops against a search.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

import speccompile
from speccompile.errors import InvalidOption
from speccompile.ops.suffix_trie import FIELDS, LISTED, Speculation, Trie
from speccompile.runtime.measure import measure_tiers
from support.errors import raises
from support.suffix_search import search
from support.tiny import admitted, cancel_all, greedy, random_prompt

USUAL = Speculation(8, 1.0, 0.0, 0.1)


def trie(room: int, depth: int) -> tuple[Trie, memoryview]:
    """An empty one, and the suffixes of a text that begins."""
    nodes, i32 = room * depth + 1, torch.int32
    tables = [torch.zeros(shape, dtype=i32) for shape in ((2,), (FIELDS, nodes), (2 * nodes,))]
    return Trie(*tables), torch.zeros(depth + 1, dtype=i32).numpy().data


def proposed(text: list[int], speculation: Speculation, longest: int = 7) -> tuple[list[int], list[float]]:
    filled, active = trie(len(text), speculation.depth)
    for token in text:
        filled.learn(active, token)
    return filled.propose(active, longest, speculation)


def test_by_hand() -> None:
    """After 1 2 came 3 twice and 4 once; the newest 1 2 has nothing after it."""
    text = [1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1, 2]
    assert proposed(text, Speculation(8, 1.0, 0.0, 0.1)) == ([3, 7], [0.5, 0.25])
    assert proposed(text, Speculation(8, 1.0, 0.0, 0.3)) == ([3], [0.5])
    assert proposed([1, 2, 3], USUAL) == ([], [])
    # One token expects 3/4, two expect 2/3 and 1/3, three expect 1/2.
    assert proposed([5, 5, 5, 5], USUAL)[0] == [5, 5]


def test_a_search_by_hand() -> None:
    """Of texts that were learned, the one that is continued is none."""
    learned = [[1, 2, 3, 4], [7, 1, 2, 3, 5], [2, 6]]
    # After 1 2 came 3 twice, and then 4 and 5: of equals the newest.
    assert search(learned, [9, 1, 2], 7, USUAL) == ([3, 5], [1.0, 0.5])
    assert search(learned, [9, 2], 7, USUAL) == ([3], [2 / 3])
    assert search(learned, [9, 4], 7, USUAL) == ([], [])


def test_a_tree_by_hand() -> None:
    """1 2 was followed by 3 twice and by 4 once, and 2 also by 6."""
    text = [1, 2, 3, 9, 1, 2, 4, 2, 6, 1, 2, 3, 7, 1, 2]
    filled, active = trie(len(text), 8)
    for token in text:
        filled.learn(active, token)
    tokens, parents, chances = filled.propose_tree(active, 6)
    # Of four 1 2, 3 followed two, and 4 one. After 1 2 3 came 7 and 9, of equals the newest first.
    assert tokens == [3, 4, 7, 9, 2, 1] and parents == [0, 0, 1, 1, 2, 3]
    assert chances == pytest.approx([2 / 4, *[1 / 4] * 5])
    assert filled.propose_tree(trie(1, 8)[1], 6)[0] == [], "nothing matches"


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 12), st.integers(2, 7))
def test_a_tree_has_the_likeliest_paths(text: list[int], nodes: int, depth: int) -> None:
    """A path is as likely as the greatest share of the occurrences of a suffix that it follows."""
    filled, active = trie(len(text), depth)
    for token in text:
        filled.learn(active, token)

    def occurrences(part: tuple[int, ...]) -> int:
        return sum(tuple(text[i : i + len(part)]) == part for i in range(len(text) - len(part) + 1))

    known = {tuple(text[i:end]) for i in range(len(text)) for end in range(i + 1, min(i + depth, len(text)) + 1)}
    shares: dict[tuple[int, ...], float] = {}
    for matched in range(1, min(depth, len(text) + 1)):
        suffix = tuple(text[len(text) - matched :])
        total = occurrences(suffix)
        for path in (part[matched:] for part in known if part[:matched] == suffix and len(part) > matched):
            shares[path] = max(shares.get(path, 0.0), occurrences((*suffix, *path)) / total)
    tokens, parents, chances = filled.propose_tree(active, nodes)
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], token))
    assert len(set(paths[1:])) == len(tokens) == min(nodes, len(shares))
    assert chances == pytest.approx([shares[path] for path in paths[1:]])
    assert chances == pytest.approx(sorted(shares.values(), reverse=True)[:nodes])


@given(st.lists(st.integers(0, 2 * LISTED), min_size=1, max_size=80))
def test_the_listed_children_are_the_most_frequent_the_newest_first(text: list[int]) -> None:
    filled, active = trie(len(text), 2)
    for token in text:
        filled.learn(active, token)
    newest = {token: place for place, token in enumerate(text)}
    wanted = sorted(newest, key=lambda token: (-text.count(token), -newest[token]))[:LISTED]
    assert [filled._token[child] for child in filled.children(0)] == wanted


def test_a_token_costs_no_more_in_a_longer_text() -> None:
    """Nodes are visited at most depth times a token, and there are no more of them."""

    class Counted(Trie):
        visits = 0

        def _child(self, parent: int, token: int) -> int:
            self.visits += 1
            return super()._child(parent, token)

    text = random_prompt(600, seed=3, vocab=5)
    shapes = ((2,), (FIELDS, 600 * 8 + 1), (2 * (600 * 8 + 1),))
    filled = Counted(*(torch.zeros(shape, dtype=torch.int32) for shape in shapes))
    active = torch.zeros(9, dtype=torch.int32).numpy().data
    seen = []
    for token in text:
        before = filled.visits
        filled.learn(active, token)
        seen.append(filled.visits - before)
    assert max(seen) == 8 and filled.size <= 600 * 8 and filled.tokens == 600


OPTIONS = {"tiers": (0, 1, 3), "max_batch": 3, "max_len": 96, "backend": "eager", "max_depth": 8, "policy": "fixed:3"}


def test_the_text_is_that_of_transformers_and_state_that_of_a_search(model: LlamaForCausalLM) -> None:
    spec = speccompile.wrap(model, "suffix", **OPTIONS)
    engine, arena = spec.engine, spec.arena
    engine.prepare("greedy", watched=True)
    before = arena.fingerprint()
    prompts = [random_prompt(9, seed, vocab=6) for seed in range(3)]
    requests = [engine.submit(prompt, max_new_tokens=40) for prompt in prompts]
    speculation = Speculation(8, 8.0, 0.0, 0.1)
    while not engine.idle:
        engine.step()
        for request in engine.running:
            if not request.new_tokens:
                continue
            text = request.prompt + request.new_tokens
            drafts, scores = search([text], text, 3, speculation)
            count = int(arena["draft_lens"][request.slot])
            assert count == max(0, min(len(drafts), request.tokens_left - 1))
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
    spec = speccompile.wrap(model, "suffix", **(OPTIONS | {"policy": "cost"}))
    prompt = random_prompt(9, 2, vocab=6)
    assert spec.generate(torch.tensor([prompt]), max_new_tokens=40)[0, 9:].tolist() == greedy(model, prompt, 40)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_depth", 1),
        ("max_depth", 1000),
        ("factor", -1),
        ("offset", "much"),
        ("offset", 1e300),
        ("factor", 10**400),
        ("min_probability", 2),
    ],
)
def test_options_that_are_refused(model: LlamaForCausalLM, name: str, value: object) -> None:
    with raises(InvalidOption, where="mode 'suffix'", name=name, value=value):
        speccompile.wrap(model, "suffix", max_len=64, backend="eager", **{name: value})


# --- other texts -------------------------------------------------------------------------------------------------


def test_a_given_text_is_quoted(model: LlamaForCausalLM) -> None:
    """What the model is about to say was given to it: nearly every draft is right."""
    prompt = random_prompt(9, 2)
    said = greedy(model, prompt, 40)
    with speccompile.wrap(model, "suffix", **(OPTIONS | {"corpus": [prompt + said, [1, 2, 3]]})) as spec:
        before = spec.arena.fingerprint()
        assert "2 given texts of 52 tokens" in spec.explain()
        assert spec.generate(torch.tensor([prompt]), max_new_tokens=40)[0, 9:].tolist() == said
        assert spec.stats.acceptance_length > 3.5
        assert {entry for entry in before if entry[0] == "arena"} <= set(spec.arena.fingerprint())


def test_earlier_texts_are_remembered_and_forgotten(model: LlamaForCausalLM) -> None:
    prompt, options = random_prompt(9, 2), OPTIONS | {"remember": 200, "prefix_reuse": False, "factor": 1.0}
    with speccompile.wrap(model, "suffix", **options) as spec:
        lengths = []
        for _ in range(2):
            spec.stats.reset()
            spec.generate(torch.tensor([prompt]), max_new_tokens=40)
            lengths.append(spec.stats.acceptance_length)
        assert lengths[1] > 3.5 > lengths[0]
        for seed in range(10, 16):
            spec.generate(torch.tensor([random_prompt(40, seed)]), max_new_tokens=20)
        spec.stats.reset()
        spec.generate(torch.tensor([prompt]), max_new_tokens=40)
        assert spec.stats.acceptance_length == lengths[0]


def test_the_dummy_slot_teaches_nobody(model: LlamaForCausalLM) -> None:
    with speccompile.wrap(model, "suffix", **(OPTIONS | {"remember": 100})) as spec:
        measure_tiers(spec.arena, spec.engine.tiers)
        assert not spec.arena["suffix_earlier_used"].any()


class Tokenizer:
    """Of words that are numbers."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        assert not add_special_tokens
        return SimpleNamespace(input_ids=[int(word) for word in text.split()])


def test_texts_are_tokenised(model: LlamaForCausalLM) -> None:
    with speccompile.wrap(model, "suffix", **OPTIONS, corpus=["5 6 7", (8, 9)], tokenizer=Tokenizer()) as spec:
        assert spec.arena["suffix_given_text"].tolist() == [5, 6, 7, -1, 8, 9, -1]


@pytest.mark.parametrize(
    ("options", "name", "reason"),
    [
        ({"corpus": "5 6"}, "corpus", "it must be a list of texts, or of lists of token ids"),
        ({"corpus": 5}, "corpus", "it must be a list of texts, or of lists of token ids"),
        ({"corpus": [[1], "5 6"]}, "corpus", "entry 1 is text: give tokenizer="),
        ({"corpus": ["5 6", "a word"], "tokenizer": Tokenizer()}, "corpus", "entry 1 does not tokenise .ValueError"),
        ({"corpus": ["5", ""], "tokenizer": Tokenizer()}, "corpus", "entry 1 does not tokenise: it has no tokens"),
        ({"corpus": [[1, 2], []]}, "corpus", "entry 1 does not tokenise: it has no tokens"),
        ({"corpus": [[1, 2.0]]}, "corpus", "entry 0 does not become a list of token ids"),
        ({"corpus": [5]}, "corpus", "entry 0 does not become a list of token ids"),
        ({"corpus": [[1], [2, 999]]}, "corpus", "got 999 in text 1"),
        ({"corpus": ["7 -3"], "tokenizer": Tokenizer()}, "corpus", "got -3 in text 0"),
        ({"tokenizer": Tokenizer()}, "tokenizer", "it is only for a corpus of texts"),
        ({"remember": -1}, "remember", "it must be an int of at least 0"),
        ({"remember": 2**40}, "remember", "its trie has more nodes than int32 holds"),
        ({"remember": 9}, "remember", "with max_depth=24 it must be 0 or at least 48"),
    ],
)
def test_texts_that_are_refused(model: LlamaForCausalLM, options: dict[str, Any], name: str, reason: str) -> None:
    with raises(InvalidOption, name=name, reason=re.compile(reason)):
        speccompile.wrap(model, "suffix", max_len=64, backend="eager", **options)
