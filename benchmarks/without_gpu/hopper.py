"""An H100 that is not there: Triton and Inductor generate code for it, and nothing runs on it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.device_interface import CudaInterface
from torch.utils import _triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from speccompile.utils.torch_private import CppBuilder, CppTorchOptions

CAPABILITY = (9, 0)
#: Of an H100 SXM, by the names that torch uses.
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 << 30,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    L2_cache_size=50 << 20,
    gcnArchName="",
)

_DRIVER = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda *_: 0,
    get_device_interface=lambda: torch.cuda,
    get_active_torch_device=lambda: torch.device("cuda", 0),
)


@contextlib.contextmanager
def triton_target() -> Iterator[None]:
    """In this context Triton compiles for sm_90 through its own JIT. It cannot launch."""
    with patch.object(driver, "_active", _DRIVER):
        yield


@contextlib.contextmanager
def hopper() -> Iterator[None]:
    """In this context Inductor compiles for ``cuda:0`` as on an H100, whatever the machine has. The only tensors there
    are fakes."""
    _load_guard()
    with contextlib.ExitStack() as stack:
        stack.enter_context(triton_target())
        for owner, name, value in (
            (torch.cuda, "get_device_properties", PROPERTIES),
            (torch.cuda, "get_device_capability", CAPABILITY),
            (torch.cuda, "get_device_name", PROPERTIES.name),
            (torch.cuda, "current_device", 0),
            (torch.cuda, "device_count", 1),
            (torch.cuda, "is_bf16_supported", True),
            (torch.cuda, "is_current_stream_capturing", True),
            (CudaInterface, "is_available", True),
            (CudaInterface, "get_device_properties", PROPERTIES),
            (CudaInterface, "is_bf16_supported", True),
            (CudaInterface.Worker, "get_device_properties", PROPERTIES),
        ):
            stack.enter_context(patch.object(owner, name, _always(value)))
        _forget()
        stack.callback(_forget)
        yield


def _always(value: object) -> Any:
    return staticmethod(lambda *_, **__: value)


def _forget() -> None:
    """torch remembers whether Triton has a device, and which."""
    for name in ("has_triton", "triton_backend", "triton_hash_with_backend"):
        getattr(_triton, name).cache_clear()


@functools.cache
def _load_guard() -> None:
    """For the rest of the process: torch has no way to take a guard back. A GPU that exists needs its own."""
    if torch.cuda.is_available():
        return
    with tempfile.TemporaryDirectory() as folder:
        # The linker would leave out libraries of torch that the guard does not call itself; one of those has c10.
        options = CppTorchOptions(include_pytorch=True, extra_flags=["-Wl,--no-as-needed", "-w"])
        builder = CppBuilder("guard", [str(Path(__file__).with_name("guard.cpp"))], options, folder)
        builder.build()
        ctypes.CDLL(builder.get_target_file_path(), mode=ctypes.RTLD_GLOBAL)
