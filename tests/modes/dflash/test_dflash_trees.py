"""Trees of a DFlash head: the likeliest paths by the distributions of its block, listed one by one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from speccompile import Tree, wrap
from speccompile.heads import DFlashHead
from support.dflash_reference import plain_drafts
from support.eagle3_specs import run_until
from support.tiny import admitted, greedy, random_prompt

DEPTH, BRANCHES = 3, 4
DYNAMIC = Tree.dynamic(nodes=9, depth=DEPTH, branches=BRANCHES)
STATIC = Tree.static([(0,), (1,), (3,), (0, 0), (0, 2), (1, 1), (0, 2, 0), (0, 2, 3)])
SIZES: dict[str, Any] = {"max_batch": 2, "max_len": 95, "backend": "eager", "policy": "fixed:0"}


@pytest.fixture(scope="module")
def head(model: LlamaForCausalLM) -> DFlashHead:
    return DFlashHead.random(model, 3, block_size=5, num_hidden_layers=2, taps=(0, 1))


@pytest.mark.parametrize("tree", [DYNAMIC, STATIC], ids=["dynamic", "static"])
def test_nodes_are_those_of_the_marginal_distributions(model: LlamaForCausalLM, head: DFlashHead, tree: Tree) -> None:
    with wrap(model, "dflash", draft=head, tiers=(0, tree), **SIZES) as spec:
        request = admitted(spec.engine, random_prompt(20), max_new_tokens=30)
        spec.set_tier(tree)
        graph = spec.engine.tiers[tree, 1, "greedy"].graph
        tokens, _ = run_until(spec, request.slot, graph, "drafts")
        parents, _ = run_until(spec, request.slot, graph, "parents")
        _, logits = plain_drafts(model, head, request.prompt + request.new_tokens)
        request.cancel()
    best = logits[:DEPTH].log_softmax(-1).topk(BRANCHES)
    chances = {
        path: sum(float(best.values[level, rank]) for level, rank in enumerate(path))
        for depth in range(1, DEPTH + 1)
        for path in itertools.product(range(BRANCHES), repeat=depth)
    }
    wanted = sorted(chances, key=lambda path: -chances[path])[: int(tree)] if tree is DYNAMIC else STATIC.paths
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[0].tolist(), parents[0, 1:].tolist(), strict=True):
        found.append((*found[parent], token))
    by_tokens = {tuple(int(best.indices[level, rank]) for level, rank in enumerate(path)) for path in wanted}
    assert set(found[1:]) == by_tokens


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("mode", ["dflash", "ngram,dflash"])
def test_two_rows_of_any_shape_have_the_targets_text(
    model: LlamaForCausalLM, head: DFlashHead, mode: str, fused: bool
) -> None:
    """Also where a lookup drafts first, and near the end of what the head drafts for."""
    names = mode.split(",")
    options = SIZES | {"tiers": (0, 2, DYNAMIC, STATIC), "fused": fused, "draft_max_len": 60}
    prompts = [random_prompt(9) * 4, random_prompt(40)]
    with wrap(model, names if len(names) > 1 else mode, draft=head, **options) as spec:
        requests = [spec.engine.submit(prompt, max_new_tokens=30) for prompt in prompts]
        shapes = itertools.cycle((DYNAMIC, 2, STATIC, 0))
        while not all(request.finished for request in requests):
            spec.set_tier(next(shapes))
            spec.engine.step()
        for prompt, request in zip(prompts, requests, strict=True):
            assert request.result().token_ids == greedy(model, prompt, 30)
        assert {DYNAMIC, STATIC} <= set(spec.stats.tier_steps)
