"""DFlash2 heads: convolutions over the block, and a choice among the likeliest tokens by the token before."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from speccompile import Tree, wrap
from speccompile.errors import CaptureMismatch, HeadKeys, InvalidHead
from speccompile.heads import DFlashHead, load_dflash, save_dflash
from speccompile.modes.dflash.selector import CandidateSelector
from speccompile.passes.step.tree_expansions import expansions
from support.dflash_reference import plain_drafts, plain_logits, selected
from support.eagle3_specs import drafted, run_until
from support.errors import raises
from support.tiny import admitted, greedy, random_prompt

BLOCK = 5
TREE = Tree.dynamic(nodes=7, depth=3, branches=3)
SIZES: dict[str, Any] = {"max_batch": 2, "max_len": 95, "backend": "eager", "policy": "fixed:0"}
WHOLE: dict[str, Any] = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
VARIANTS: dict[str, dict[str, Any]] = {
    "convolutions": {"conv_kernel_size": 3, "conv_group_size": 16},
    "selector": {"selector_rank": 6, "selector_top_k": 5},
    "whole": WHOLE | {"windows": (7, None)},
}


def head_of(model: LlamaForCausalLM, **fields: Any) -> DFlashHead:
    """With a selector that often changes the choice."""
    head = DFlashHead.random(model, 3, block_size=BLOCK, num_hidden_layers=2, taps=(0, 1), **fields)
    if head.config.selector_rank:
        head.candidate_selector.predecessor_codebook.data *= 3
    return head


@pytest.fixture(scope="module", params=list(VARIANTS))
def head(model: LlamaForCausalLM, request: pytest.FixtureRequest) -> DFlashHead:
    return head_of(model, **VARIANTS[request.param])


def test_chains_and_trees_are_those_of_the_formulas(model: LlamaForCausalLM, head: DFlashHead) -> None:
    most, changed = head.config.most_drafts, 0
    with wrap(model, "dflash", draft=head, tiers=(0, 1, most, TREE), **SIZES) as spec:
        for length in (1, 20, 33):
            request = admitted(spec.engine, random_prompt(length, seed=length), max_new_tokens=30)
            for _ in range(2):
                text = request.prompt + request.new_tokens
                drafts, _ = plain_drafts(model, head, text)
                changed += drafts != plain_logits(model, head, text).argmax(-1).tolist()
                for count in (1, most):
                    assert drafted(spec, request.slot, count)[0] == drafts[:count]
                if head.config.selector_rank:
                    assert proposed(spec, request.slot) == expanded(model, head, text)
                spec.set_tier(most)
                spec.engine.step()
            request.cancel()
    assert changed or not head.config.selector_rank


def proposed(spec: Any, slot: int) -> set[tuple[int, ...]]:
    spec.set_tier(TREE)
    graph = spec.engine.tiers[TREE, 1, "greedy"].graph
    tokens, parents = (run_until(spec, slot, graph, name)[0][0].tolist() for name in ("drafts", "parents"))
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents[1:], strict=True):
        found.append((*found[parent], token))
    return {path for path in found[1:] if -1 not in path}


def expanded(model: LlamaForCausalLM, head: DFlashHead, text: list[int]) -> set[tuple[int, ...]]:
    """EAGLE-2's expansion of the selector's scores."""
    outputs: list[torch.Tensor] = []
    logits = plain_logits(model, head, text, outputs)
    level: dict[tuple[int, ...], float] = {(): 0.0}
    everything: dict[tuple[int, ...], float] = {}
    for depth, expansion in enumerate(expansions(TREE)):
        below = {}
        for path in sorted(level, key=lambda path: -level[path])[: expansion.count]:
            scores = selected(head, [text[-1], *path][-1], outputs[0][depth], logits[depth]).log_softmax(-1)
            best = scores.topk(TREE.branches)
            for token, share in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                below[*path, token] = level[path] + share
        everything |= below
        level = below
    return set(sorted(everything, key=lambda path: -everything[path])[: int(TREE)])


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "drawn"])
def test_texts_are_those_without_drafts(model: LlamaForCausalLM, head: DFlashHead, sampled: bool) -> None:
    prompts = [random_prompt(9) * 4, random_prompt(40)]
    options: dict[str, Any] = {"do_sample": True, "seed": 5, "temperature": 0.7, "top_k": 9} if sampled else {}
    with wrap(model, "dflash", draft=head, **SIZES | {"tiers": (0, 2, TREE)}) as spec:
        texts = []
        for shapes in ((0,), (TREE, 2, 0)):
            requests = [spec.engine.submit(prompt, max_new_tokens=30, eos_token_id=[], **options) for prompt in prompts]
            shape = itertools.cycle(shapes)
            while not all(request.finished for request in requests):
                spec.set_tier(next(shape))
                spec.engine.step()
            texts.append([request.result().token_ids for request in requests])
    assert texts[0] == texts[1]
    if not sampled:
        assert texts[0] == [greedy(model, prompt, 30) for prompt in prompts]


def test_published_layouts(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """speculators' (written by ``save_dflash``) and z-lab's, with the tensors that both have."""
    head = head_of(model, **WHOLE)
    save_dflash(head, tmp_path / "speculators", dtype=torch.float32)
    tensors = load_file(tmp_path / "speculators" / "model.safetensors")
    assert tuple(tensors["layers.1.attention_conv.base_kernel"].shape) == (2, 2, 64)
    assert tuple(tensors["layers.1.mlp_conv.kernel_projection.weight"].shape) == (2 * 2 * 8, 64)
    assert tuple(tensors["candidate_selector.hidden_projection.weight"].shape) == (6, 64)
    assert tuple(tensors["candidate_selector.predecessor_codebook"].shape) == (128, 6)
    written = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert written["speculators_model_type"] == "dflash2" and written["architectures"] == ["DFlash2DraftModel"]
    assert {name: written[name] for name in WHOLE} == WHOLE
    flat = head.config.layer_keys() | {"block_size": BLOCK, "vocab_size": 128, "is_causal": False}
    flat |= {"dflash_config": WHOLE | {"mask_token_id": 3, "target_layer_ids": [0, 1]}}
    (tmp_path / "zlab").mkdir()
    (tmp_path / "zlab" / "config.json").write_text(json.dumps(flat | {"architectures": ["DFlash2DraftModel"]}))
    save_file(tensors, tmp_path / "zlab" / "model.safetensors")
    for layout in ("speculators", "zlab"):
        loaded = load_dflash(tmp_path / layout, model)
        assert loaded.config == head.config
        assert all(torch.equal(loaded.own_state()[key], value) for key, value in head.own_state().items())
    del tensors["candidate_selector.successor_codebook"]
    tensors["layers.0.mlp_conv.base_kernel"] = torch.zeros(2, 3, 64)
    save_file(tensors, tmp_path / "zlab" / "model.safetensors")
    missing = r"missing: candidate_selector.successor_codebook \[128, 6\]\n.*base_kernel is \[2, 3, 64\]"
    with raises(HeadKeys, problems=re.compile(missing)):
        load_dflash(tmp_path / "zlab", model)


def test_what_speculators_layout_does_not_have_is_not_written(model: LlamaForCausalLM, tmp_path: Path) -> None:
    with raises(InvalidHead, reason=re.compile("no convolutions without a candidate selector")):
        save_dflash(head_of(model, conv_kernel_size=2), tmp_path)


def test_the_check_of_the_capture_covers_the_selector(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    right = CandidateSelector.forward

    def other_than_captured(self: CandidateSelector, *given: torch.Tensor) -> torch.Tensor:
        return right(self, *given) + (0.0 if torch.compiler.is_exporting() else 1.0)

    monkeypatch.setattr(CandidateSelector, "forward", other_than_captured)
    with pytest.raises(CaptureMismatch):
        wrap(model, "dflash", draft=head_of(model, **WHOLE), tiers=(0, 1), **SIZES)
