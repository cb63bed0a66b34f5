"""The capture check of a packed folder runs once, and again for other weights, code or options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers.models.llama import modeling_llama

import speccompile
from speccompile import Adapters, pretrained, quantize
from speccompile.compiler import attempts
from speccompile.lowering import backends
from speccompile.lowering.backends import Eager
from support.packed_models import PROMPTS, wrapped
from support.tiny import tiny_llama


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "folder"
    quantize(tiny_llama(layers=1), folder)
    return folder


@pytest.fixture
def folder(packed: Path, tmp_path: Path, native: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("speccompile.utils.storage.cache_dir", lambda: tmp_path / "cache")
    return packed


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry for each check that ran."""
    found: list[int] = []
    check = attempts.check_capture

    def noted(*arguments: Any) -> float:
        found.append(1)
        return check(*arguments)

    monkeypatch.setattr(attempts, "check_capture", noted)
    yield found


def wrap(model: Any, **options: Any) -> str:
    with wrapped(model, **{"tiers": (0,), "max_batch": 1} | options) as spec:
        (line,) = [line for line in spec.explain().splitlines() if line.startswith("capture check")]
        return line


def test_it_runs_once_for_a_folder(folder: Path, checks: list[int], tmp_path: Path) -> None:
    first = wrap(pretrained.load_model(str(folder)))
    assert len(checks) == 1
    model = pretrained.load_model(str(folder))
    assert wrap(model) == first and wrap(model) == first and len(checks) == 1
    # A longer sequence is another check, and so are adapters and a hook, every time.
    wrap(model, max_len=90)
    assert len(checks) == 2
    for count in (4, 6):
        wrap(model, adapters=Adapters(count=1))
        assert len(checks) == count
    handle = model.model.norm.register_forward_hook(lambda *_: None)
    wrap(model)
    handle.remove()
    assert len(checks) == 7
    quantize(tiny_llama(seed=1, layers=1), tmp_path / "other")
    wrap(pretrained.load_model(str(tmp_path / "other")))
    assert len(checks) == 8


@dataclass(frozen=True)
class Mine(Eager):
    """A backend of the user."""

    name: str = "mine"


def test_it_runs_with_code_whose_changes_no_hash_shows(
    folder: Path, checks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pretrained.load_model(str(folder))
    wrap(model)
    monkeypatch.setitem(backends._own, "mine", Mine)
    for count in (2, 3):
        wrap(model, backend="mine")
        assert len(checks) == count
    forward = modeling_llama.LlamaMLP.forward
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: 2 * forward(self, x))
        replaced = pretrained.load_model(str(folder))
        with wrapped(replaced, tiers=(0,), max_batch=1) as spec:
            assert len(checks) > 3 and spec.check(PROMPTS[:1, :8].tolist(), max_new_tokens=6, eos_token_id=[])


def test_a_failed_check_is_not_recorded(folder: Path, checks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(attempts, "check_kernels", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            wrap(pretrained.load_model(str(folder)))
    wrap(pretrained.load_model(str(folder)))
    assert len(checks) == 2


def test_it_runs_in_every_other_wrap(folder: Path, checks: list[int]) -> None:
    model = tiny_llama(layers=1)
    for count in (1, 2):
        speccompile.wrap(model, "none", tiers=(0,), max_len=60, backend="eager", weights="int4").close()
        assert len(checks) == count
