"""Gemma 4's assistants in steps: they draft what transformers' class drafts, and the text is the target's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma4ForCausalLM

from speccompile import Tree, wrap
from speccompile.errors import HeadKeys, InvalidHead, InvalidOption
from speccompile.heads import load_gemma4_assistant
from speccompile.utils.kv_memory import KVMemory
from support import gemma4, published
from support.eagle3_specs import drafted, run_until
from support.errors import raises
from support.shape_texts import texts_by_shapes
from support.tiny import admitted, greedy, tiny_llama

PATHS = [(0,), (1,), (0, 0), (1, 0), (1, 1), (0, 0, 0)]
TREE = Tree.static(PATHS)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7, 2], list(range(20, 60))]
OPTIONS: dict[str, Any] = {"tiers": (0, 3, TREE), "max_batch": 2, "max_len": 80, "backend": "eager"}
#: Configs of assistants, and of their targets.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "E2B": ({"use_ordered_embeddings": True}, {}),
    "31B": ({"sliding_window": 5}, {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}),
}


@pytest.fixture(scope="module")
def target() -> Gemma4ForCausalLM:
    return gemma4.target()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = gemma4.assistant_config()
    tensors = gemma4.weights_of(gemma4.their_assistant(config))
    return str(published.write(tmp_path_factory.mktemp("assistant"), tensors, config))


@pytest.fixture(scope="module", params=VARIANTS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, ...]]:
    """A target, transformers' assistant, and the wrapped pair."""
    own, fields = VARIANTS[request.param]
    model, config = gemma4.target(**fields), gemma4.assistant_config(**own)
    theirs = gemma4.their_assistant(config)
    folder = published.write(tmp_path_factory.mktemp("assistant"), gemma4.weights_of(theirs), config)
    with wrap(model, "gemma4_assistant", draft=str(folder), policy="fixed:0", **OPTIONS) as spec:
        yield model, theirs, spec


def test_drafts_are_those_of_transformers(case: tuple[Any, ...]) -> None:
    """After prompts, after steps with and without drafts, and after trees."""
    model, theirs, spec = case
    for prompt in PROMPTS:
        request = admitted(spec.engine, prompt, max_new_tokens=24)
        for tier in (3, 0, 0, TREE, 3, 3):
            own = gemma4.TheirDrafts(model, theirs, [*prompt, *request.new_tokens])
            drafts, logits = drafted(spec, request.slot, 3)
            expected, theirs_logits = own.chain(3)
            assert drafts == expected
            # Where theirs has a number below all others, outside the centroids, ours is -inf.
            seen = logits.isfinite()
            assert torch.equal(seen, theirs_logits > theirs_logits.min(-1, keepdim=True).values) or seen.all()
            torch.testing.assert_close(logits[seen], theirs_logits[seen], rtol=1e-3, atol=1e-3)
            nodes, _ = run_until(spec, request.slot, spec.engine.tiers[TREE, 1, "greedy"].graph, "drafts")
            assert nodes[0].tolist() == own.tree(PATHS)
            spec.set_tier(tier)
            spec.engine.step()
        request.cancel()


def test_the_text_is_the_targets(case: tuple[Any, ...]) -> None:
    model, _, spec = case
    expected = [greedy(model, prompt, 20) for prompt in PROMPTS]
    for shapes in ((3,), (TREE,), (0, 3, TREE)):
        assert texts_by_shapes(spec, PROMPTS, (20, 20, 20), shapes, 0) == expected


@pytest.mark.parametrize(
    "extra",
    [{"kv_memory": KVMemory(200, tokens=200, page=16)}, {"acceptance": "rejection"}],
    ids=["pages", "rejection"],
)
def test_other_steps_draft_the_same(target: Gemma4ForCausalLM, folder: str, extra: dict[str, Any]) -> None:
    """Over pages of KV, and by a rule that reads the probabilities of drafts."""
    sizes: dict[str, Any] = OPTIONS | {"policy": "fixed:3"}
    found = []
    for options in ({}, extra):
        with wrap(target, "gemma4_assistant", draft=folder, **sizes, **options) as spec:
            made = spec.engine.submit(PROMPTS[0], max_new_tokens=24).result().token_ids
            found.append((made, spec.stats.accepted_tokens))
            sampled = spec.engine.submit(PROMPTS[0], max_new_tokens=24, do_sample=True, temperature=0.7, seed=3)
            assert len(sampled.result().token_ids) == 24
    assert found[0] == found[1] and found[0][0] == greedy(target, PROMPTS[0], 24)


@pytest.mark.parametrize("kv", ["float16", "int8"])
def test_kv_may_be_rounded(target: Gemma4ForCausalLM, folder: str, kv: str) -> None:
    with wrap(target, "gemma4_assistant", draft=folder, kv=kv, policy="fixed:3", **OPTIONS) as spec:
        assert spec.check([PROMPTS[0]], max_new_tokens=12)


def damaged(tmp_path: Path, target: Any, drop: str = "", add: str = "", **fields: Any) -> Any:
    config = gemma4.assistant_config()
    tensors = gemma4.weights_of(gemma4.their_assistant(config))
    tensors.pop(drop, None)
    tensors |= {add: torch.zeros(2)} if add else {}
    published.write(tmp_path, tensors, gemma4.assistant_config(**fields))
    return wrap(target, "gemma4_assistant", draft=str(tmp_path), tiers=(0, 2), max_len=40)


def test_damaged_files_are_refused(target: Gemma4ForCausalLM, tmp_path: Path) -> None:
    with raises(HeadKeys, problems=re.compile(r"missing: model\.layers\.1\.self_attn\.q_norm\.weight \[16\]")):
        damaged(tmp_path, target, drop="model.layers.1.self_attn.q_norm.weight")
    with raises(HeadKeys, problems=re.compile("not known: model.layers.0.self_attn.k_proj.weight")):
        damaged(tmp_path, target, add="model.layers.0.self_attn.k_proj.weight")
    with raises(HeadKeys, problems=re.compile("mlp.up_proj.weight")):
        damaged(tmp_path, target, intermediate_size=40)
    with raises(InvalidHead, reason=re.compile("must be 'gemma4_assistant', got 'gemma4'")):
        published.write(tmp_path, {"norm.weight": torch.zeros(2)}, {"model_type": "gemma4"})
        wrap(target, "gemma4_assistant", draft=str(tmp_path), tiers=(0, 2), max_len=40)
    with raises(InvalidHead, reason=re.compile("transformers refuses its config: .*hidden_size_per_layer_input")):
        damaged(tmp_path, target, hidden_size_per_layer_input=8)
    with raises(InvalidHead, reason="it cannot choose 5 of 7 centroids of 96 tokens"):
        damaged(tmp_path, target, use_ordered_embeddings=True, num_centroids=7)


def test_other_targets_are_refused(target: Gemma4ForCausalLM, folder: str, tmp_path: Path) -> None:
    with raises(InvalidHead, reason="it is for Gemma 4, and the target is a llama model"):
        damaged(tmp_path, tiny_llama(vocab=gemma4.VOCAB))
    with raises(InvalidHead, reason=re.compile("its sizes are {'hidden states': 64, 'vocabulary': 96}, the target's")):
        damaged(tmp_path, gemma4.target(hidden_size=32))
    with raises(InvalidHead, reason=re.compile(r"cannot read the target's KV of 2 heads of size 24 \(sliding_att")):
        damaged(tmp_path, gemma4.target(head_dim=24))
    with raises(InvalidHead, reason=re.compile("it reads KV of a sliding_attention layer, and the target has none")):
        damaged(tmp_path, gemma4.target(layer_types=[gemma4.FULL] * 4))
    with raises(InvalidOption, name="draft", value=None):
        wrap(target, "gemma4_assistant", tiers=(0, 2), max_len=40)
    with raises(InvalidHead, reason=re.compile("must be torch.float32 on cpu, as the target, got torch.float16")):
        wrap(target, "gemma4_assistant", draft=load_gemma4_assistant(folder, target).half(), tiers=(0, 2), max_len=40)
