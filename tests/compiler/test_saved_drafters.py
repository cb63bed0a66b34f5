"""Packages of wraps whose drafter is a network: they say where it is, and hold its capture."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile.compiler import frontend as stages_module
from speccompile.errors import CannotSave, InvalidHead, PretrainedError
from speccompile.heads import Eagle3Head
from speccompile.modes.network import draft_model, head_network
from speccompile.passes.pipeline import Pipeline
from support import published
from support.errors import raises
from support.published import FLAT
from support.tiny import greedy, random_prompt, tiny_llama

OPTIONS: dict[str, Any] = {"tiers": (0, 2), "backend": "eager", "max_len": 31, "policy": "fixed:2"}
#: What the config of a head of the target's own sizes says.
CONFIG = FLAT | {
    "intermediate_size": 128,
    "head_dim": 16,
    "draft_vocab_size": 128,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
}


def written(kind: str, target: LlamaForCausalLM, folder: Path) -> dict[str, Any]:
    """A drafter in ``folder``, and how to wrap with it."""
    if kind == "model":
        tiny_llama(layers=1).save_pretrained(folder)
        return {"mode": "draft_target", "draft": str(folder), "fused": False}
    head = Eagle3Head.random(target, taps=(1, 2, 4))
    published.write(folder, {key: value.clone() for key, value in head.state_dict().items()}, CONFIG)
    return {"mode": "eagle3_one_model", "draft": folder}


@pytest.mark.parametrize(("kind", "layers"), [("model", 2), ("head", 6)])
def test_a_package_comes_back_with_its_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, layers: int
) -> None:
    # The head's config has the layers that such a target has.
    target = tiny_llama(layers=layers)
    prompt, path, drafts, ran = random_prompt(12), tmp_path / "tiny.spec", [], []
    monkeypatch.setattr("speccompile.utils.storage.cache_dir", lambda: tmp_path / "cache")

    def text_of(spec: speccompile.Speculator) -> list[int]:
        tokens: list[int] = spec.generate(torch.tensor([prompt]), max_new_tokens=16)[0, 12:].tolist()
        drafts.append((spec.stats.draft_tokens, spec.stats.accepted_tokens))
        return tokens

    with speccompile.wrap(target, **OPTIONS, **written(kind, target, tmp_path / "drafter")) as spec:
        assert text_of(spec) == greedy(target, prompt, 16)
        spec.save(path)
    check = Pipeline.check
    monkeypatch.setattr(Pipeline, "check", lambda self, *args: ran.append(self.tier) or check(self, *args))
    for module in (stages_module, draft_model):
        monkeypatch.setattr(module, "capture", lambda *args: pytest.fail("captured again"))
    monkeypatch.setattr(head_network, "exported", lambda *args: pytest.fail("captured again"))
    monkeypatch.setattr("speccompile.utils.storage.cache_dir", lambda: tmp_path / "another")
    with speccompile.load(path, target) as spec:
        # Over the two networks alone.
        assert ran == ["the captured model"] * 2
        assert text_of(spec) == greedy(target, prompt, 16)
    assert drafts[0] == drafts[1] and drafts[0][0] > 0
    (tmp_path / "drafter" / "config.json").unlink()
    kinds = {"model": PretrainedError, "head": InvalidHead}
    with raises(kinds[kind], source=str(tmp_path / "drafter")):
        speccompile.load(path, target)


def test_weights_of_a_drafter_are_not_in_a_package(tmp_path: Path) -> None:
    with (
        speccompile.wrap(tiny_llama(), "draft_target", draft=tiny_llama(layers=1), **OPTIONS) as spec,
        raises(
            CannotSave,
            reason=re.compile("holds no weights, and a LlamaForCausalLM has weights;.*as its folder or hub id"),
        ),
    ):
        spec.save(tmp_path / "tiny.spec")
