"""Blocks whose drafts depend on the token before (DSpark), with a draft vocabulary, and from the newest token on."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Tree, wrap
from speccompile.errors import CaptureMismatch
from speccompile.heads import DFlashHead
from speccompile.modes.dflash.markov import MarkovHead
from speccompile.passes.step.tree_expansions import expansions
from support.dflash_reference import after_token, draft_ids, plain_drafts, plain_logits
from support.eagle3_specs import drafted, run_until
from support.tiny import admitted, greedy, random_prompt

BLOCK, DEPTH, BRANCHES = 5, 3, 4
DYNAMIC = Tree.dynamic(nodes=9, depth=DEPTH, branches=BRANCHES)
STATIC = Tree.static([(0,), (1,), (3,), (0, 0), (0, 2), (1, 1), (0, 2, 0), (0, 2, 3)])
SIZES: dict[str, Any] = {"max_batch": 2, "max_len": 95, "backend": "eager", "policy": "fixed:0"}
VARIANTS: dict[str, dict[str, Any]] = {
    "markov": {"markov_rank": 8},
    "anchor": {"sample_from_anchor": True},
    "vocabulary": {"draft_vocab_size": 50},
    "all": {"markov_rank": 8, "sample_from_anchor": True, "draft_vocab_size": 50},
}


@pytest.fixture(scope="module", params=list(VARIANTS))
def head(model: LlamaForCausalLM, request: pytest.FixtureRequest) -> DFlashHead:
    return DFlashHead.random(model, 3, block_size=BLOCK, num_hidden_layers=2, taps=(0, 1), **VARIANTS[request.param])


def test_chains_and_trees_are_those_of_the_formulas(model: LlamaForCausalLM, head: DFlashHead) -> None:
    most = head.config.most_drafts
    with wrap(model, "dflash", draft=head, tiers=(0, 1, most, DYNAMIC, STATIC), **SIZES) as spec:
        for length in (1, 20):
            request = admitted(spec.engine, random_prompt(length, seed=length), max_new_tokens=30)
            text = request.prompt + request.new_tokens
            drafts, _ = plain_drafts(model, head, text)
            logits = plain_logits(model, head, text)
            for count in (1, most):
                assert drafted(spec, request.slot, count)[0] == drafts[:count]
            for tree in (DYNAMIC, STATIC):
                spec.set_tier(tree)
                graph = spec.engine.tiers[tree, 1, "greedy"].graph
                tokens, _ = run_until(spec, request.slot, graph, "drafts")
                parents, _ = run_until(spec, request.slot, graph, "parents")
                found: list[tuple[int, ...]] = [()]
                for token, parent in zip(tokens[0].tolist(), parents[0, 1:].tolist(), strict=True):
                    found.append((*found[parent], token))
                assert set(found[1:]) == likeliest(head, text[-1], logits, tree)
            request.cancel()


def likeliest(head: DFlashHead, newest: int, logits: torch.Tensor, tree: Tree) -> set[tuple[int, ...]]:
    """The paths of a tree. Of a Markov head's levels only the likeliest nodes branch, as in
    :class:`speccompile.passes.step.draft_tree.DraftTree`."""
    ids, level = draft_ids(head), {(): (0.0, ())}
    chances: dict[tuple[int, ...], float] = {}
    ranks: dict[tuple[int, ...], tuple[int, ...]] = {}
    for depth, expansion in enumerate(expansions(tree)):
        count = expansion.count if head.config.markov_rank else len(level)
        below = {}
        for path in sorted(level, key=lambda path: -level[path][0])[: count if tree is DYNAMIC else None]:
            chance, ranked = level[path]
            row = logits[depth] + after_token(head, [newest, *path][-1])
            best = row.log_softmax(-1).topk(BRANCHES)
            for rank, (value, index) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
                below[(*path, int(ids[index]))] = (chance + value, (*ranked, rank))
        level = below
        chances |= {path: chance for path, (chance, _) in below.items()}
        ranks |= {path: ranked for path, (_, ranked) in below.items()}
    if tree is STATIC:
        return {path for path, ranked in ranks.items() if ranked in STATIC.paths}
    return set(sorted(chances, key=lambda path: -chances[path])[: int(tree)])


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "drawn"])
def test_texts_are_those_without_drafts(model: LlamaForCausalLM, head: DFlashHead, fused: bool, sampled: bool) -> None:
    options = SIZES | {"tiers": (0, 2, DYNAMIC, STATIC), "fused": fused, "draft_max_len": 60}
    prompts = [random_prompt(9) * 4, random_prompt(40)]
    drawn: list[dict[str, Any]] = [
        {"do_sample": True, "seed": 5, "temperature": 0.7, "top_k": 9, "repetition_penalty": 1.2},
        {"do_sample": True, "seed": 6},
    ]
    with wrap(model, "dflash", draft=head, **options) as spec:
        texts = []
        for shapes in ((0,), (DYNAMIC, 2, STATIC, 0)):
            given = drawn if sampled else [{}, {}]
            requests = [
                spec.engine.submit(prompt, max_new_tokens=30, eos_token_id=[], **own)
                for prompt, own in zip(prompts, given, strict=True)
            ]
            shape = itertools.cycle(shapes)
            while not all(request.finished for request in requests):
                spec.set_tier(next(shape))
                spec.engine.step()
            texts.append([request.result().token_ids for request in requests])
        assert {DYNAMIC, STATIC} <= set(spec.stats.tier_steps)
    assert texts[0] == texts[1]
    if not sampled:
        assert texts[0] == [greedy(model, prompt, 30) for prompt in prompts]


def test_the_check_of_the_capture_covers_the_bias(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    right = MarkovHead.forward

    def other_than_captured(self: MarkovHead, before: torch.Tensor) -> torch.Tensor:
        return right(self, before) + (0.0 if torch.compiler.is_exporting() else 1.0)

    monkeypatch.setattr(MarkovHead, "forward", other_than_captured)
    head = DFlashHead.random(model, 3, block_size=BLOCK, taps=(0, 1), markov_rank=6)
    with pytest.raises(CaptureMismatch):
        wrap(model, "dflash", draft=head, tiers=(0, 1), **SIZES)
