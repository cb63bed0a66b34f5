"""Domino heads: a GRU over the drafts of a block corrects its logits."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaForCausalLM

from speccompile import Tree, wrap
from speccompile.errors import HeadKeys, InvalidHead
from speccompile.heads import DFlashHead, load_dflash, save_dflash
from speccompile.passes.step.tree_expansions import expansions
from support.dflash_reference import draft_ids, plain_logits
from support.eagle3_specs import drafted, run_until
from support.errors import raises
from support.tiny import admitted, greedy, random_prompt

BLOCK = 5
TREE = Tree.dynamic(nodes=7, depth=3, branches=3)
SIZES: dict[str, Any] = {"max_batch": 2, "max_len": 95, "backend": "eager", "policy": "fixed:0"}
SHIFTED: dict[str, Any] = {
    "gru_hidden_dim": 12,
    "emb_dim": 9,
    "pure_draft_prefix_len": 1,
    "sample_from_anchor": True,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "shifted": SHIFTED,
    "from mask tokens": {"gru_hidden_dim": 12, "emb_dim": 9},
    "vocabulary": SHIFTED | {"draft_vocab_size": 50, "pure_draft_prefix_len": 2},
}


@pytest.fixture(scope="module", params=list(VARIANTS))
def head(model: LlamaForCausalLM, request: pytest.FixtureRequest) -> DFlashHead:
    return head_of(model, **VARIANTS[request.param])


def head_of(model: LlamaForCausalLM, **fields: Any) -> DFlashHead:
    """With a correction that often changes the choice."""
    head = DFlashHead.random(model, 3, block_size=BLOCK, num_hidden_layers=2, taps=(0, 1), **fields)
    head.domino_head.embed_proj[2].weight.data *= 8
    return head


def corrected(head: DFlashHead, path: list[int], output: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Logits ``[Vd]`` after ``path``, the newest token and drafts, by torch's own GRU, after SGLang's rollout."""
    config, weights = head.config, head.own_state()
    if len(path) - 1 < config.pure_draft_prefix_len:
        return logits
    gru = nn.GRU(config.hidden_size, config.gru_hidden_dim, batch_first=True, bias=False).double()
    gru.weight_ih_l0.data = weights["domino_head.prefix_gru.weight_ih_l0"].double()
    gru.weight_hh_l0.data = weights["domino_head.prefix_gru.weight_hh_l0"].double()
    with torch.no_grad():
        _, state = gru(head.embed_tokens.weight[torch.tensor(path)].double()[None])
    inner = weights["domino_head.embed_proj.0.weight"].double() @ torch.cat([output, state[0, 0]])
    return logits + weights["domino_head.embed_proj.2.weight"].double() @ (inner * inner.sigmoid())


def test_chains_and_trees_are_those_of_the_formulas(model: LlamaForCausalLM, head: DFlashHead) -> None:
    most, ids, changed = head.config.most_drafts, draft_ids(head), 0
    assert most == BLOCK - 1
    with wrap(model, "dflash", draft=head, tiers=(0, 1, most, TREE), **SIZES) as spec:
        for length in (1, 20, 33):
            request = admitted(spec.engine, random_prompt(length, seed=length), max_new_tokens=30)
            text = request.prompt + request.new_tokens
            outputs: list[torch.Tensor] = []
            logits = plain_logits(model, head, text, outputs)
            path = [text[-1]]
            for place in range(most):
                row = corrected(head, path, outputs[0][place], logits[place])
                path.append(int(ids[row.argmax()]))
            changed += path[1:] != ids[logits.argmax(-1)].tolist()[:most]
            for count in (1, most):
                assert drafted(spec, request.slot, count)[0] == path[1 : count + 1]
            assert proposed(spec, request.slot) == expanded(head, text[-1], outputs[0], logits)
            request.cancel()
    assert changed


def proposed(spec: Any, slot: int) -> set[tuple[int, ...]]:
    spec.set_tier(TREE)
    graph = spec.engine.tiers[TREE, 1, "greedy"].graph
    tokens, parents = (run_until(spec, slot, graph, name)[0][0].tolist() for name in ("drafts", "parents"))
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents[1:], strict=True):
        found.append((*found[parent], token))
    return {path for path in found[1:] if -1 not in path}


def expanded(head: DFlashHead, newest: int, outputs: torch.Tensor, logits: torch.Tensor) -> set[tuple[int, ...]]:
    """EAGLE-2's expansion of the corrected logits: the state of a node is that of its own path."""
    ids, level = draft_ids(head), {(): 0.0}
    everything: dict[tuple[int, ...], float] = {}
    for depth, expansion in enumerate(expansions(TREE)):
        below = {}
        for path in sorted(level, key=lambda path: -level[path])[: expansion.count]:
            best = corrected(head, [newest, *path], outputs[depth], logits[depth]).log_softmax(-1).topk(TREE.branches)
            for token, share in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                below[*path, int(ids[token])] = level[path] + share
        everything |= below
        level = below
    return set(sorted(everything, key=lambda path: -everything[path])[: int(TREE)])


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "drawn"])
def test_texts_are_those_without_drafts(model: LlamaForCausalLM, head: DFlashHead, sampled: bool) -> None:
    prompts = [random_prompt(9) * 4, random_prompt(40)]
    options: dict[str, Any] = {"do_sample": True, "seed": 5, "temperature": 0.7, "top_k": 9} if sampled else {}
    with wrap(model, "dflash", draft=head, **SIZES | {"tiers": (0, 2, TREE), "fused": not sampled}) as spec:
        texts = []
        for shapes in ((0,), (TREE, 2, 0)):
            requests = [spec.engine.submit(prompt, max_new_tokens=30, eos_token_id=[], **options) for prompt in prompts]
            shape = itertools.cycle(shapes)
            while not all(request.finished for request in requests):
                spec.set_tier(next(shape))
                spec.engine.step()
            texts.append([request.result().token_ids for request in requests])
        assert "Domino head" in spec.explain()
    assert texts[0] == texts[1]
    if not sampled:
        assert texts[0] == [greedy(model, prompt, 30) for prompt in prompts]


def files(folder: Path, head: DFlashHead, *, prefix: bool = False, **own: Any) -> Path:
    """As SpecForge writes them; with ``prefix`` by speculators' names of the tensors."""
    names = head.own_state()
    tensors = {key if prefix else key.removeprefix("domino_head."): value.clone() for key, value in names.items()}
    domino = {"projector_type": "domino", "emb_dim": 9, "gru_hidden_dim": 12, "pure_draft_prefix_len": 1}
    domino |= {"shift_label": True, "mask_token_id": 3, "target_layer_ids": [0, 1]}
    config = head.config.layer_keys() | {"block_size": BLOCK, "vocab_size": 128, "dflash_config": domino | own}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_published_layouts(model: LlamaForCausalLM, tmp_path: Path) -> None:
    head = head_of(model, **SHIFTED)
    shapes = {key: tuple(value.shape) for key, value in head.own_state().items()}
    assert shapes["domino_head.prefix_gru.weight_ih_l0"] == (36, 64)
    assert shapes["domino_head.prefix_gru.weight_hh_l0"] == (36, 12)
    assert shapes["domino_head.embed_proj.0.weight"] == (9, 76)
    assert shapes["domino_head.embed_proj.2.weight"] == (128, 9)
    for prefix in (False, True):
        loaded = load_dflash(files(tmp_path / str(prefix), head, prefix=prefix), model)
        assert loaded.config == head.config
        assert all(torch.equal(loaded.own_state()[key], value) for key, value in head.own_state().items())


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        ({"projector_type": "other"}, "projector_type='other'; choose from dflash, dspark, domino"),
        ({"gru_hidden_dim": None}, "gru_hidden_dim in its config must be a size, got None"),
        ({"emb_dim": "9"}, "emb_dim in its config must be a size, got '9'"),
        ({"markov_rank": 3}, "Domino's correction with a markov_rank"),
    ],
)
def test_other_heads_are_refused(model: LlamaForCausalLM, tmp_path: Path, own: dict[str, Any], reason: str) -> None:
    with raises(InvalidHead, reason=re.compile(re.escape(reason))):
        load_dflash(files(tmp_path / "head", head_of(model, **SHIFTED), **own), model)


def test_tensors_that_do_not_fit_are_named(model: LlamaForCausalLM, tmp_path: Path) -> None:
    with raises(HeadKeys, problems=re.compile(r"weight_hh_l0 is \[36, 12\] and must be \[33, 11\]")):
        load_dflash(files(tmp_path / "head", head_of(model, **SHIFTED), gru_hidden_dim=11), model)
    with raises(InvalidHead, reason="no layout for Domino heads is written"):
        save_dflash(head_of(model, **SHIFTED), tmp_path / "saved")
