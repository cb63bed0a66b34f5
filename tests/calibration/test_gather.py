"""What a calibration is: the mean square of each input of each linear."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import speccompile
from speccompile.errors import InvalidInput
from support.errors import raises
from support.packed_models import MODELS
from support.tiny import tiny_llama

TEXTS = [torch.randint(1, 128, (length,), generator=torch.Generator().manual_seed(length)) for length in (40, 1, 70)]


def by_hooks(model: PreTrainedModel, texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same of modules, one text at a time."""
    seen: dict[str, list[torch.Tensor]] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda _, inputs, name=name: seen.setdefault(f"{name}.weight", []).append(inputs[0].flatten(0, -2).double())
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    ]
    with torch.no_grad():
        for text in texts:
            model(input_ids=text[None])
    for handle in handles:
        handle.remove()
    return {name: torch.cat(rows).square().mean(0) for name, rows in seen.items()}


@pytest.mark.parametrize("name", ["untied", "tied", "gpt2", "bfloat16"])
def test_importance_is_the_mean_square_of_each_input(name: str) -> None:
    model = MODELS[name]()
    found = speccompile.calibrate(model, TEXTS)
    wanted = by_hooks(model, TEXTS)
    if name in ("tied", "gpt2"):
        # By the weight's first name.
        first = "transformer.wte.weight" if name == "gpt2" else "model.embed_tokens.weight"
        wanted[first] = wanted.pop("lm_head.weight")
    assert found.importance.keys() == wanted.keys() and found.tokens == 111
    for weight, values in wanted.items():
        torch.testing.assert_close(found.importance[weight].double(), values, rtol=1e-5, atol=0)


def test_texts_are_read_as_far_as_asked() -> None:
    model = tiny_llama()
    assert speccompile.calibrate(model, iter(TEXTS), tokens=45).digest == (
        speccompile.calibrate(model, [TEXTS[0], TEXTS[1].tolist(), TEXTS[2][:4]]).digest
    )


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ([], "they have no tokens"),
        ([[]], "they have no tokens"),
        ([[5, 128]], "outside of 0 .. 127"),
        (["The sea is blue."], "give its token ids"),
    ],
)
def test_texts_that_cannot_be_read(texts: Any, says: str) -> None:
    with raises(InvalidInput, reason=re.compile(re.escape(says))):
        speccompile.calibrate(tiny_llama(), texts)
