"""``mode="auto"`` passes over what it chose itself and cannot build, and says why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.errors import CaptureMismatch, HeadKeys
from speccompile.heads import MtpHead
from speccompile.modes.mtp.network import MtpNetwork
from speccompile.modes.ngram import NGram
from support.auto_choices import CHECKPOINTS, checkpoint, choose
from support.errors import raises
from support.published_mtp import keys_of, write
from support.tiny import greedy, random_prompt, tiny_llama

SMALL: dict[str, Any] = {"tiers": (0, 1), "max_len": 32, "backend": "eager", "policy": "fixed:1"}


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama()


def why(spec: Speculator) -> str:
    return next(line for line in spec.explain().splitlines() if line.startswith("auto"))


def with_module(model: LlamaForCausalLM, folder: Path) -> MtpHead:
    """An MTP module in the model's checkpoint."""
    head = MtpHead.random(model, 1)
    write(folder, model, keys_of(head, "deepseek", 2))
    model.config.name_or_path = str(folder)
    return head


def refused(*_: Any, **__: Any) -> float:
    raise CaptureMismatch(model="MtpHead", difference=1.0, allowed=0.1, where="of the draft head")


def test_modules_that_cannot_be_loaded_are_passed_over(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """The names are those of a module; the tensors are of other shapes, and most are missing."""
    model.config.name_or_path = checkpoint(tmp_path, CHECKPOINTS["deepseek"][0], index=False)
    with wrap(model, "auto", **SMALL) as spec:
        assert type(spec.mode) is NGram
        assert "mtp cannot draft with the MTP module of the model's checkpoint (the draft head" in why(spec)
        assert "missing: layers.0.enorm.weight [64]" in why(spec)
    # Asked for by name, they are an error.
    with raises(HeadKeys, problems=re.compile(r"missing: layers\.0\.enorm\.weight")):
        wrap(model, "mtp", **SMALL)


def test_a_damaged_checkpoint_is_passed_over(model: LlamaForCausalLM, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"no such thing")
    model.config.name_or_path = str(tmp_path)
    assert "model.safetensors is damaged" in choose(model, native=False).reason


def test_modules_that_cannot_be_built_are_passed_over(
    model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = with_module(model, tmp_path)
    monkeypatch.setattr(MtpNetwork, "check", refused)
    with wrap(model, "auto", **SMALL) as spec:
        assert type(spec.mode) is NGram and "(the captured graph does not compute what MtpHead computes" in why(spec)
        prompt = random_prompt(9)
        ids = torch.tensor([prompt])
        assert spec.generate(ids, torch.ones_like(ids), max_new_tokens=8)[0, 9:].tolist() == greedy(model, prompt, 8)
    with pytest.raises(CaptureMismatch):
        wrap(model, "auto", draft=head, **SMALL)
