"""Which vectors Inductor takes, and when it has to try them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch._inductor import cpu_vec_isa as isas

from speccompile.utils.instruction_sets import instruction_sets, try_vectors


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is compiled and loaded for trial from now on; torch's vectors do not work."""
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    seen: list[str] = []

    def check(self: isas.VecISA, code: str) -> bool:
        seen.append(str(self))
        return "ATen" not in code

    try_vectors()
    isas.VecISA._VecISA__bool__impl.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(isas.VecISA, "check_build", check)
        yield seen
    try_vectors()
    isas.VecISA._VecISA__bool__impl.cache_clear()


def test_avx512_is_taken_untried_until_the_ops_fail(tried: list[str]) -> None:
    if "avx512" not in isas.x86_isa_checker():
        pytest.skip("this CPU has no AVX-512")
    instruction_sets.__wrapped__().join()
    assert "avx512" in str(isas.pick_vec_isa()) and "avx2" not in tried
    try_vectors()
    assert isas.pick_vec_isa() is isas.invalid_vec_isa


def test_avx2_is_tried_beside_other_work(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if "avx2" not in isas.x86_isa_checker():
        pytest.skip("this CPU has no AVX2")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    instruction_sets.__wrapped__().join()
    before = len(tried)
    assert before and not isas.pick_vec_isa() and len(tried) == before
