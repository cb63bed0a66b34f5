"""What ops make of tensors without values, once for all that look alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from speccompile.graph import fakes
from speccompile.graph.fakes import fake, faking, kind, result_of

CPU = torch.device("cpu")
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    fakes._result.cache_clear()


def made(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Its own fake."""
    with faking():
        return torch.empty(sizes, dtype=dtype, device=CPU)


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is aten.cat.default
        return func(*args, **(kwargs or {}))


def test_what_looks_alike_is_computed_once() -> None:
    with _Counted() as counted:
        results = [result_of(aten.cat.default, ([made(2, 3), made(1, 3)],), {}) for _ in range(3)]
    assert counted.calls == 1 and all(tuple(one.shape) == (3, 3) for one in results)


def test_what_is_cached_in_inference_mode_serves_outside_of_it() -> None:
    shape = (71, 73)
    with torch.inference_mode():
        cached = fake(shape, torch.float32, CPU)
        result = result_of(aten.neg.default, (cached,), {})
    assert not cached.is_inference() and not result.is_inference()
    with faking():
        assert cached[None].shape == result[None].shape == (1, *shape)


@pytest.mark.parametrize(
    ("args", "others"),
    [
        (lambda: ([made(2, 3)], 0), lambda: ([made(3, 3)], 0)),
        (lambda: ([made(2, 3)], 0), lambda: ([made(2, 3, dtype=torch.float16)], 0)),
        (lambda: ([made(2, 3), made(2, 3)], 0), lambda: ([made(2, 3), made(2, 3)], 1)),
    ],
    ids=["shape", "dtype", "number"],
)
def test_what_an_op_can_see_is_told_apart(args: Any, others: Any) -> None:
    for given in (args(), others()):
        with faking():
            wanted = aten.cat.default(*given)
        assert kind(result_of(aten.cat.default, given, {})) == kind(wanted)


def test_strides_are_told_apart() -> None:
    with faking():
        across = made(3, 2).t()
    for tensor in (made(2, 3), across):
        assert result_of(aten.add.Tensor, (tensor, tensor), {}).stride() == tensor.stride()


def test_the_default_dtype_is_told_apart() -> None:
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            assert result_of(aten.div.Tensor, (fake((2,), torch.int64, CPU),) * 2, {}).dtype == dtype
        finally:
            torch.set_default_dtype(torch.float32)
