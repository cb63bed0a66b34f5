"""Draft models, MTP modules and Medusa heads that draft trees: texts are those of no speculation, whatever shapes
follow one another, and what drafts for itself is never wrong."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, Tree, wrap
from speccompile.errors import InvalidTiers
from speccompile.heads import DFlashHead, MedusaHeads, MtpHead
from speccompile.passes.step.ranked_tree import of_independent
from support.drafters import PENALTIES, ragged, random_drafter
from support.engines import read_all
from support.errors import raises
from support.medusa import fitted_heads
from support.shape_texts import counts_by_shape, texts_by_shapes
from support.tiny import admitted, random_prompt

CHAIN = Tree.static([(0,), (0, 0), (0, 0, 0)])
STATIC = Tree.static([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
DYNAMIC = Tree.dynamic(nodes=9, depth=3, branches=3)
SHAPES = (0, 3, CHAIN, STATIC, DYNAMIC)
SIZES: dict[str, Any] = {"tiers": SHAPES, "max_batch": 2, "max_len": 63, "backend": "eager", "policy": "fixed:0"}
KINDS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"do_sample": True, **PENALTIES}}
PROMPTS = ragged(3, 3)


def written(model: LlamaForCausalLM) -> list[list[int]]:
    return [model.generate(torch.tensor([p]), max_new_tokens=24, do_sample=False)[0].tolist() for p in PROMPTS]


@pytest.fixture(scope="module")
def itself(model: LlamaForCausalLM) -> Iterator[Speculator]:
    with wrap(model, "draft_target", draft=model, **SIZES) as made:
        yield made


@pytest.fixture(scope="module", params=["itself", "mtp", "medusa", "dflash", "pard"])
def spec(request: pytest.FixtureRequest, model: LlamaForCausalLM) -> Iterator[Speculator]:
    """The target's drafts are right on one branch, those of random networks never, those of Medusa heads mostly."""
    if request.param == "itself":
        yield request.getfixturevalue("itself")
        return
    mode, draft = {
        "mtp": lambda: ("mtp_eagle_one_model", MtpHead.random(model, 1)),
        "medusa": lambda: ("medusa", fitted_heads(model, written(model), 3)),
        "dflash": lambda: ("dflash", DFlashHead.random(model, 3, block_size=5, num_hidden_layers=2, taps=(0, 1))),
        "pard": lambda: ("draft_target", random_drafter()),
    }[request.param]()
    own = {"mask_token_id": 9} if request.param == "pard" else {}
    # The rows of a batch are those of ``itself``.
    with wrap(model, mode, draft=draft, **own, **SIZES | {"max_batch": 1}) as made:
        yield made


@pytest.fixture(scope="module")
def drafter() -> LlamaForCausalLM:
    return random_drafter()


@pytest.fixture(scope="module")
def another(model: LlamaForCausalLM, drafter: LlamaForCausalLM) -> Iterator[Speculator]:
    """A drafter that is nothing like the target."""
    options = SIZES | {"tiers": (0, STATIC, DYNAMIC)}
    with wrap(model, "draft_target", draft=drafter, prefix_reuse=False, **options) as made:
        yield made


@pytest.fixture(scope="module")
def expected(model: LlamaForCausalLM) -> dict[str, list[list[int]]]:
    with wrap(model, "none", **SIZES | {"tiers": (0,)}) as plain:
        return {kind: texts_of(plain, (0,), **options) for kind, options in KINDS.items()}


def texts_of(spec: Speculator, shapes: tuple[int, ...], seed: int = 0, **options: Any) -> list[list[int]]:
    return texts_by_shapes(spec, PROMPTS, (14, 17, 20), shapes, seed, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_do_not_depend_on_shapes(spec: Speculator, expected: dict[str, list[list[int]]], kind: str) -> None:
    before = spec.arena.fingerprint()
    for shapes in ((STATIC,), (DYNAMIC,), SHAPES):
        spec.stats.reset()
        assert texts_of(spec, shapes, seed=len(shapes), **KINDS[kind]) == expected[kind]
        assert any(shape in spec.stats.tier_steps for shape in shapes)
    assert set(before) <= set(spec.arena.fingerprint())


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_written_as_a_tree_drafts_the_chain(spec: Speculator, kind: str) -> None:
    counts = [counts_by_shape(spec, PROMPTS, 20, shape, **KINDS[kind]) for shape in (3, CHAIN)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 3, **PENALTIES}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", [3, STATIC], ids=["chain", "tree"])
def test_the_target_drafts_for_itself_without_a_mistake(
    itself: Speculator, shape: int, options: dict[str, Any]
) -> None:
    """Each node has its own path as its text, and the noise of its place: else some path would end early."""
    # Of a known prompt the first token would be a step's.
    prompt = random_prompt(17, seed=len(options) + 10 * (shape == 3))
    itself.set_tier(shape)
    itself.stats.reset()
    itself.engine.submit(prompt, max_new_tokens=1 + 8 * 4, **options).result()
    assert itself.stats.acceptance_length == 4


@pytest.mark.parametrize("kind", KINDS)
def test_another_model_s_trees_leave_texts_as_they_are(
    another: Speculator, expected: dict[str, list[list[int]]], kind: str
) -> None:
    """Two rows and a third that waits, shapes mixed within one text."""
    assert texts_of(another, (0, STATIC, DYNAMIC), seed=2, **KINDS[kind]) == expected[kind]


def test_another_model_s_trees_leave_text_and_drafter_s_kv_as_they_are(another: Speculator) -> None:
    found = []
    for shape in (0, STATIC, DYNAMIC):
        another.set_tier(shape)
        request = admitted(another.engine, PROMPTS[1], max_new_tokens=28)
        while len(request.new_tokens) < 20:
            another.engine.step()
        end = len(PROMPTS[1]) + 19
        read_all(another, request.slot)
        kv = [another.arena[f"drafter_{part}_0"][request.slot, :end].clone() for part in "kv"]
        found.append((request.new_tokens[:20], kv))
        request.cancel()
    for text, kv in found[1:]:
        assert text == found[0][0]
        torch.testing.assert_close(kv, found[0][1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_drafter_that_is_no_number_drafts_nothing(
    another: Speculator, drafter: LlamaForCausalLM, value: float
) -> None:
    another.set_tier(0)
    expected = another.engine.submit(PROMPTS[1], max_new_tokens=12).result().token_ids
    weight = drafter.lm_head.weight
    before = weight[7].clone()
    with torch.no_grad():
        weight[7] = value
        try:
            for shape in (STATIC, DYNAMIC):
                another.set_tier(shape)
                assert another.engine.submit(PROMPTS[1], max_new_tokens=12).result().token_ids == expected
        finally:
            weight[7] = before


def test_heads_that_are_no_numbers_draft_nothing(model: LlamaForCausalLM) -> None:
    heads = MedusaHeads(3, 1, model.config.hidden_size, model.config.vocab_size).eval()
    with torch.no_grad():
        heads[1][-1].weight[9] = float("inf")
        heads[2][-1].weight[9] = float("nan")
    with wrap(model, "medusa", draft=heads, **SIZES | {"max_batch": 1, "tiers": (0, STATIC, DYNAMIC)}) as spec:
        texts = []
        for shape in (0, STATIC, DYNAMIC):
            spec.set_tier(shape)
            texts.append(spec.engine.submit(PROMPTS[1], max_new_tokens=12).result().token_ids)
        assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_rows_at_the_end_of_what_the_drafter_reads(model: LlamaForCausalLM, fused: bool) -> None:
    """It reads shorter texts than the target."""
    options = SIZES | {"tiers": (0, DYNAMIC), "max_batch": 1, "draft_max_len": 40, "fused": fused}
    with wrap(model, "draft_target", draft=model, **options) as spec:
        texts = []
        for shape in (0, DYNAMIC):
            spec.set_tier(shape)
            texts.append(spec.engine.submit(list(range(30)), max_new_tokens=32).result().token_ids)
        assert texts[0] == texts[1] and spec.stats.accepted_tokens > 4


def test_medusa_trees_are_no_deeper_than_its_heads(model: LlamaForCausalLM) -> None:
    heads = MedusaHeads(2, 1, model.config.hidden_size, model.config.vocab_size).eval()
    with raises(InvalidTiers, reason=re.compile("at most 2 tokens")):
        wrap(model, "medusa", draft=heads, **SIZES | {"tiers": (0, DYNAMIC)})
    shallow = Tree.dynamic(nodes=9, depth=2, branches=5)
    with wrap(model, "medusa", draft=heads, **SIZES | {"max_batch": 1, "tiers": (0, shallow)}) as spec:
        spec.set_tier(shallow)
        spec.engine.submit(PROMPTS[1], max_new_tokens=12).result()
        # Of ten tokens of a head after one another no more than five fit.
        assert 5 * spec.stats.tier_steps[shallow] <= spec.stats.draft_tokens


@pytest.mark.parametrize(("nodes", "levels", "count"), [(1, 3, 2), (6, 2, 3), (12, 3, 3), (40, 3, 3), (9, 1, 4)])
def test_the_tree_of_independent_drafts_is_the_likeliest(nodes: int, levels: int, count: int) -> None:
    """Against all paths, listed and sorted."""
    logprobs = torch.randn((2, levels, 20), generator=torch.Generator().manual_seed(nodes)).log_softmax(-1)
    best = logprobs.topk(count)
    tokens, parents, lens = of_independent(best.indices, best.values, nodes)
    for row in range(2):
        chances = {
            path: sum(float(best.values[row, level, rank]) for level, rank in enumerate(path))
            for depth in range(1, levels + 1)
            for path in itertools.product(range(count), repeat=depth)
        }
        wanted = sorted(chances, key=lambda path: -chances[path])[:nodes]
        by_tokens = {tuple(int(best.indices[row, i, rank]) for i, rank in enumerate(path)) for path in wanted}
        paths: list[tuple[int, ...]] = [()]
        for node in range(int(lens[row])):
            assert int(parents[row, node]) <= node
            paths.append((*paths[int(parents[row, node])], int(tokens[row, node])))
        assert set(paths[1:]) == by_tokens and int(lens[row]) == min(nodes, len(chances))
