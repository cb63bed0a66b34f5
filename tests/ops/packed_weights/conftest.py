"""Packed weights in the printed step, which needs no compiled bodies."""

from __future__ import annotations

import pytest

from speccompile.lowering import kernels
from speccompile.lowering.kernels import Kernels


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = kernels.load_cpu_ops("rounded")
    assert reason is None
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: Kernels(True, "for the test"))
