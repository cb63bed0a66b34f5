"""One file knows in what supported versions of transformers differ."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from speccompile.utils import transformers_version
from speccompile.utils.transformers_version import CACHE, cache_argument
from support.families import model_of
from support.tiny import tiny_llama

ROOT = Path(__file__).parents[2] / "speccompile"
KNOWS = ROOT / "utils" / "transformers_version.py"
OLD_NAMES = re.compile(r"past_key_values|cache_params")


def test_no_other_file_names_an_old_argument_of_the_cache() -> None:
    wrong = [path for path in ROOT.rglob("*.py") if path != KNOWS and OLD_NAMES.search(path.read_text())]
    assert OLD_NAMES.search(KNOWS.read_text()) and not wrong


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_the_cache_is_found_in_the_forward_and_in_the_output(name: str) -> None:
    model = tiny_llama() if name == "llama" else model_of(name)
    argument, ids = cache_argument(model), torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        whole = model(ids).logits
        first = model(ids[:, :2], use_cache=True)
        last = model(ids[:, 2:], use_cache=True, **{argument: first[argument]}).logits
    torch.testing.assert_close(last[:, -1], whole[:, -1])


def test_a_layer_calls_the_cache_as_its_model_does() -> None:
    assert cache_argument(tiny_llama().model.layers[0]) == CACHE


class Own(nn.Module):
    """A model whose code comes with its weights."""

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None) -> None: ...


class Without(nn.Module):
    def forward(self, input_ids: torch.Tensor) -> None: ...


def test_a_models_own_code_may_use_an_old_name() -> None:
    assert cache_argument(Own()) == "past_key_values"
    assert cache_argument(Without()) == ""


def test_before_the_renaming_another_argument_was_called_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    class Xlm(nn.Module):
        def forward(self, input_ids: torch.Tensor, cache: dict[str, torch.Tensor] | None = None) -> None: ...

    for names, found in ((("cache", "past_key_values", "cache_params"), "cache"), (("past_key_values",), "")):
        monkeypatch.setattr(transformers_version, "CACHE_NAMES", names)
        assert cache_argument(Xlm()) == found
