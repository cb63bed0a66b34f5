"""An EAGLE-3 head that drafts trees: held against EAGLE-2's expansion, written down once more."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, Tree, load
from speccompile.errors import InvalidTiers, UnknownTier
from speccompile.guides import regex_guide
from speccompile.heads import Eagle3Head, save_eagle3
from speccompile.policies import Cost, Gate
from support.eagle3_specs import TAPS, drafted, eagle3, plain_of, run_until, states_of
from support.errors import raises
from support.guide_tokenizers import EOS, common
from support.shape_texts import counts_by_shape, texts_by_shapes
from support.tiny import admitted, tiny_llama

CHAIN = Tree.static([(0,), (0, 0), (0, 0, 0)])
STATIC = Tree.static([(0,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0), (0, 1, 1)])
WIDE = Tree.dynamic(nodes=10, depth=4, branches=3)
SHAPES = (0, 3, STATIC, WIDE)
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 40, "repetition_penalty": 1.2}
KINDS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": SAMPLED}
PROMPTS = [[row, *(random.Random(row).randrange(128) for _ in range(length))] for row, length in enumerate((2, 9, 33))]
TINY = {"layers": 4}


@pytest.fixture(scope="module")
def head(model: LlamaForCausalLM) -> Eagle3Head:
    """With its own vocabulary. Heads with the whole one draft under guides, beside lookups and in packages."""
    return Eagle3Head.random(model, taps=TAPS, draft_vocab_size=48, norm_output=True)


def with_trees(model: LlamaForCausalLM, head: Any, mode: str = "eagle3_one_model", **options: Any) -> Speculator:
    return eagle3(model, head, mode, **({"policy": "fixed:0", "max_len": 63} | options))


@pytest.fixture(scope="module")
def whole(model: LlamaForCausalLM) -> Eagle3Head:
    """With the target's vocabulary."""
    return Eagle3Head.random(model, taps=TAPS)


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM, head: Eagle3Head) -> Iterator[Speculator]:
    with with_trees(model, head, tiers=SHAPES, max_batch=2) as made:
        yield made


def expanded(head: Eagle3Head, model: LlamaForCausalLM, text: list[int], tree: Tree) -> set[tuple[int, ...]]:
    """Token paths of the tree after ``text``, each path's logits from its own chain."""
    plain, states = plain_of(head), states_of(model, text)

    def children(path: tuple[int, ...]) -> list[tuple[float, int]]:
        hidden, tokens = plain.fused(*states), [*text[1:]]
        for token in path:
            _, carried = plain.rows(torch.tensor(tokens), hidden)
            hidden, tokens = torch.cat([hidden, carried[-1:]]), [*tokens, token]
        shares = plain.rows(torch.tensor(tokens), hidden)[0][-1].log_softmax(-1)
        best = shares.topk(tree.branches)
        offsets = plain.weights["d2t"][best.indices] if "d2t" in plain.weights else torch.zeros_like(best.indices)
        return list(zip(best.values.tolist(), (best.indices + offsets).tolist(), strict=True))

    found: dict[tuple[int, ...], float] = {}
    level, left = {(): 0.0}, int(tree)
    for depth in range(tree.depth):
        below = {(*path, token): chance + share for path, chance in level.items() for share, token in children(path)}
        found |= below
        if depth + 1 < tree.depth:
            count = min(-(-left // (tree.depth - 1 - depth)), len(below))
            left -= count
            level = dict(sorted(below.items(), key=lambda item: -item[1])[:count])
    return set(sorted(found, key=lambda path: -found[path])[: int(tree)])


def proposed(spec: Speculator, slot: int, tree: Tree) -> set[tuple[int, ...]]:
    """Token paths of what a greedy step would draft for a slot now."""
    graph = spec.engine.tiers[tree, 1, "greedy"].graph
    drafts = run_until(spec, slot, graph, "drafts")[0][0].tolist()
    parents = run_until(spec, slot, graph, "parents")[0][0].tolist()
    paths: list[tuple[int, ...]] = [()]
    for node, token in enumerate(drafts, 1):
        paths.append((*paths[parents[node]], token))
    return {path for path in paths[1:] if -1 not in path}


def test_trees_are_those_of_the_paper(spec: Speculator, model: LlamaForCausalLM, head: Eagle3Head) -> None:
    for prompt in PROMPTS:
        request = admitted(spec.engine, prompt, max_new_tokens=30)
        for shape in (0, WIDE, 3):
            spec.set_tier(shape)
            spec.engine.step()
            text = [*prompt, *request.new_tokens]
            assert proposed(spec, request.slot, WIDE) == expanded(head, model, text, WIDE)
        request.cancel()


def test_a_static_tree_has_the_likeliest_tokens_of_each_node(
    spec: Speculator, model: LlamaForCausalLM, head: Eagle3Head
) -> None:
    request = admitted(spec.engine, PROMPTS[1], max_new_tokens=30)
    text = [*PROMPTS[1], *request.new_tokens]
    everything = expanded(head, model, text, Tree.dynamic(nodes=39, depth=3, branches=3))
    found = proposed(spec, request.slot, STATIC)
    assert len(found) == len(STATIC.paths) and found <= everything
    assert next(iter({path[:1] for path in found if len(path) == 3})) == tuple(drafted(spec, request.slot, 3)[0][:1])
    request.cancel()


@pytest.mark.parametrize("most", [1, 2, 4])
def test_near_the_end_paths_are_shorter(spec: Speculator, most: int) -> None:
    """No draft token is proposed that could not be emitted."""
    request = admitted(spec.engine, PROMPTS[1], max_new_tokens=most + 2)
    room = most + 2 - len(request.new_tokens) - 1
    for tree in (STATIC, WIDE):
        deepest = max(map(len, proposed(spec, request.slot, tree)), default=0)
        # What is likeliest need not be deep.
        assert deepest == min(room, tree.depth) if tree.parents else min(room, 2) <= deepest <= room
    request.cancel()


def texts_of(spec: Speculator, shapes: tuple[int, ...], seed: int = 0, **options: Any) -> list[list[int]]:
    return texts_by_shapes(spec, PROMPTS, (16, 20, 24), shapes, seed, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_do_not_depend_on_shapes(spec: Speculator, kind: str) -> None:
    expected = texts_of(spec, (0,), **KINDS[kind])
    for shapes in ((STATIC,), (WIDE,), SHAPES):
        assert texts_of(spec, shapes, seed=len(shapes), **KINDS[kind]) == expected


def test_with_shared_noise_a_tree_accepts_more(spec: Speculator) -> None:
    accepted = []
    for shape in (3, WIDE):
        spec.stats.reset()
        texts_by_shapes(spec, PROMPTS, (40, 40, 28), (shape,), 0, **SAMPLED)
        accepted.append(spec.stats.acceptance_length)
    assert accepted[1] > accepted[0] > 1.05


def test_the_head_is_warm_after_trees(spec: Speculator) -> None:
    """After steps of any shape it drafts the same chain."""
    chains = []
    for shapes in ((0,), (3,), (WIDE,), (STATIC,)):
        request = admitted(spec.engine, PROMPTS[2], max_new_tokens=28)
        for step in range(30):
            spec.set_tier(shapes[step % len(shapes)])
            if len(request.new_tokens) < 12:
                spec.engine.step()
        while len(request.new_tokens) < 18:
            spec.set_tier(0)
            spec.engine.step()
        chains.append((request.new_tokens[:18], drafted(spec, request.slot, 3)[0]))
        request.cancel()
    assert all(chain == chains[0] for chain in chains)


def test_trees_follow_a_guide_and_own_limits() -> None:
    model = tiny_llama(layers=4, vocab=300)
    guide = regex_guide("((ab|ba|c)d){8,}", common())
    options: dict[str, Any] = {"do_sample": True, "seed": 3, "guide": guide, "eos_token_id": EOS}
    options_of_wrap: dict[str, Any] = {"tiers": (0, WIDE), "max_batch": 1}
    with with_trees(model, Eagle3Head.random(model, taps=TAPS), **options_of_wrap) as spec:
        texts = []
        for shape, limit in ((0, None), (WIDE, None), (WIDE, 2), (WIDE, 0)):
            spec.set_tier(shape)
            request = spec.engine.submit(PROMPTS[0], max_new_tokens=40, num_draft_tokens=limit, **options)
            texts.append(request.result().token_ids)
    assert all(text == texts[0] for text in texts)


def test_bits_under_inductor(model: LlamaForCausalLM, head: Eagle3Head) -> None:
    """Log-probabilities too, of a chain, of the same as a tree, which drafts the same, and of another tree."""
    shapes, options = (0, 3, CHAIN, WIDE), {"max_batch": 1, "backend": "inductor"}
    with with_trees(model, head, tiers=shapes, **options) as spec:
        found = []
        for shape in shapes:
            spec.set_tier(shape)
            request = spec.engine.submit(PROMPTS[1], max_new_tokens=30, logprobs=True)
            found.append((request.result().token_ids, request.result().logprobs))
        counts = [counts_by_shape(spec, PROMPTS, 25, shape) for shape in (3, CHAIN)]
        assert counts[0] == counts[1]
    assert all(one == found[0] for one in found)


def test_a_package_has_its_trees(model: LlamaForCausalLM, tmp_path: Path) -> None:
    save_eagle3(Eagle3Head.random(model, taps=TAPS), tmp_path / "head", embedding=True)
    with with_trees(model, str(tmp_path / "head"), tiers=(0, WIDE), max_batch=1) as spec:
        spec.set_tier(WIDE)
        expected = spec.engine.submit(PROMPTS[1], max_new_tokens=20).result().token_ids
        spec.save(tmp_path / "package.spec")
    with load(tmp_path / "package.spec", model) as loaded:
        loaded.set_tier(WIDE)
        assert loaded.engine.submit(PROMPTS[1], max_new_tokens=20).result().token_ids == expected
        assert loaded.stats.tier_steps[WIDE] > 0


@pytest.mark.parametrize(
    ("fields", "mode", "reason"),
    [
        ({"windows": (16,)}, "eagle3_one_model", "sliding windows"),
        ({"mask_token_id": 5}, "eagle3_one_model", "at once"),
        ({}, "eagle3", "segments"),
    ],
    ids=["windows", "at_once", "segments"],
)
def test_heads_that_draft_chains_alone(model: LlamaForCausalLM, fields: dict[str, Any], mode: str, reason: str) -> None:
    head = Eagle3Head.random(model, taps=TAPS, **fields)
    with raises(InvalidTiers, reason=re.compile(reason)):
        with_trees(model, head, mode, tiers=(0, WIDE), confidence=mode == "eagle3")


@pytest.mark.parametrize("kind", KINDS)
def test_split_heads_draft_the_same_trees(spec: Speculator, split: Speculator, kind: str) -> None:
    """In executables of their own, before the step."""
    for shape in (STATIC, WIDE):
        found = []
        for own in (spec, split):
            own.set_tier(shape)
            own.stats.reset()
            # Alone: a split drafter's steps read no prompt along.
            request = own.engine.submit(PROMPTS[1], max_new_tokens=25, seed=4, **KINDS[kind])
            found.append((request.result().token_ids, own.stats.accepted_tokens, own.stats.draft_tokens))
        assert found[0] == found[1] and found[0][2] > 40


@pytest.fixture(scope="module")
def split(model: LlamaForCausalLM, head: Eagle3Head) -> Iterator[Speculator]:
    with with_trees(model, head, "eagle3", tiers=(0, STATIC, WIDE), max_batch=1) as made:
        yield made


@pytest.fixture(scope="module")
def beside_lookups(model: LlamaForCausalLM, whole: Eagle3Head) -> Iterator[Speculator]:
    """Compiled, for more rows than there are requests."""
    mode: Any = ["suffix", "eagle3_one_model"]
    with with_trees(model, whole, mode, tiers=(0, 3, STATIC, WIDE), max_batch=4, backend="inductor") as made:
        yield made


def assert_texts_do_not_depend_on_lookups(spec: Speculator, kinds: Sequence[str]) -> None:
    """Rows with and without a lookup in one batch, chains and trees in turn, and what the policy chooses."""
    for kind in kinds:
        expected = texts_of(spec, (0,), **KINDS[kind])
        for shapes in ((WIDE,), tuple(spec.tiers)):
            spec.stats.reset()
            assert texts_of(spec, shapes, seed=3, **KINDS[kind]) == expected, kind
            assert sum(count for tier, count in spec.stats.tier_steps.items() if isinstance(tier, Tree)) > 0
    spec.engine.policy = Cost()
    prompts = [(prompt * 3)[:33] for prompt in PROMPTS]
    again = [spec.engine.submit(prompt, max_new_tokens=30) for prompt in prompts]
    texts = [request.result().token_ids for request in again]
    spec.set_tier(0)
    assert texts == [spec.engine.submit(prompt, max_new_tokens=30).result().token_ids for prompt in prompts]


def test_lookups_beside_trees_of_a_head(model: LlamaForCausalLM, whole: Eagle3Head) -> None:
    mode: Any = ["suffix", "eagle3_one_model"]
    with with_trees(model, whole, mode, tiers=(0, 3, WIDE), max_batch=2) as spec:
        assert_texts_do_not_depend_on_lookups(spec, ("sampled",))


def test_compiled_lookups_beside_trees_of_a_head(beside_lookups: Speculator) -> None:
    """Greedy requests alone: steps that draw are tested uncompiled, and take long to compile."""
    assert_texts_do_not_depend_on_lookups(beside_lookups, ("greedy",))


def test_a_checkpoint_of_a_head_that_drafts_at_once(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is, is known when it has been loaded."""
    head = Eagle3Head.random(model, taps=TAPS, mask_token_id=5)
    monkeypatch.setattr("speccompile.modes.eagle3.mode.load_eagle3", lambda *_: head)
    with raises(InvalidTiers, reason=re.compile("at once")):
        with_trees(model, "a folder", tiers=(0, WIDE))


def test_rows_without_a_request_beside_lookups(beside_lookups: Speculator) -> None:
    """Where the head's executable does not run, of rows that hold no request nothing is stored, or another shape's."""
    spec, texts = beside_lookups, []
    for shapes in ((0,), (WIDE, STATIC)):
        requests = [spec.engine.submit([7 + row, 5] * 12, max_new_tokens=24) for row in range(3)]
        ran = set()
        while not all(request.finished for request in requests):
            live = [request.slot for request in requests if not request.finished and request.new_tokens]
            found = [bool(spec.arena["draft_lens"][slot] > 0) for slot in live]
            shape = shapes[-1] if found and all(found) else shapes[0]
            ran.add((shape, bool(found) and all(found)))
            spec.set_tier(shape)
            spec.engine.step()
        texts.append([request.result().token_ids for request in requests])
    assert texts[0] == texts[1] and (STATIC, True) in ran


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_limit_keeps_the_likeliest_nodes_of_a_static_tree(spec: Speculator, limit: int) -> None:
    """Ranks that the shape does not have do not count."""
    request = admitted(spec.engine, PROMPTS[1], max_new_tokens=30)
    whole = proposed(spec, request.slot, STATIC)
    spec.arena["draft_limit"][request.slot] = limit
    kept = proposed(spec, request.slot, STATIC)
    assert len(kept) == limit and kept <= whole
    assert all(path[:-1] in {(), *kept} for path in kept)
    request.cancel()


@pytest.mark.parametrize("policy", [Gate(draft_len=WIDE), Cost(candidates=(0, WIDE))], ids=["gate", "cost"])
def test_policies_that_name_trees_are_refused_before_anything_is_built(model: LlamaForCausalLM, policy: Any) -> None:
    with raises(UnknownTier, tier=WIDE):
        with_trees(model, Eagle3Head.random(model, taps=TAPS), tiers=(0, WIDE), policy=policy)


def test_more_branches_than_tokens(model: LlamaForCausalLM) -> None:
    head = Eagle3Head.random(model, taps=TAPS, draft_vocab_size=2)
    with raises(InvalidTiers, reason=re.compile("at most as many branches as the drafter has tokens")):
        with_trees(model, head, tiers=(0, WIDE))
