"""Devices differ by traits; a comparison with a device's name stands only where torch's own API of it is called."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import speccompile
from speccompile.errors import UnknownDevice
from speccompile.utils.devices import TRAITS, find_device, traits_of, unused_gpu
from support.errors import raises
from support.gpus import pretend_gpus

PACKAGE = Path(speccompile.__file__).parent
#: They call torch.cuda, name the machine, or list what runs on a device of that type.
API = {"utils/streams.py", "utils/machine.py", "utils/device_memory.py", "lowering/kernel_list.py"}


def test_traits_are_those_of_the_kind_of_device() -> None:
    assert traits_of(torch.device("cpu")).host_memory and not traits_of(torch.device("cpu")).asynchronous
    assert traits_of(torch.device("cuda", 1)) is TRAITS["cuda"] and TRAITS["cuda"].replaces_attention
    other = traits_of(torch.device("meta"))
    assert not (other.host_memory or other.asynchronous or other.cpp_ops or other.triton_ops)


def compares_names(source: str) -> bool:
    """Whether a type of device is compared with a name, also as a part of a tuple, or ``is_cuda`` is read."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == "is_cuda":
            return True
        if isinstance(node, ast.Compare):
            parts = list(ast.walk(node))
            kind = any(isinstance(part, ast.Attribute | ast.Name) and _is_kind(ast.unparse(part)) for part in parts)
            if kind and any(isinstance(part, ast.Constant) and part.value in TRAITS for part in parts):
                return True
    return False


def _is_kind(name: str) -> bool:
    return name.endswith(("device.type", "device_type"))


def test_code_asks_for_traits() -> None:
    asks = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if compares_names(path.read_text())}
    assert asks <= API


@pytest.mark.parametrize(
    "line",
    [
        "x.is_cuda",
        "if x.device.type == 'cpu': pass",
        "'cuda' != device_type",
        "device.type in ('cpu',)",
        "(x.dtype, x.device.type) == (y, 'cpu')",
    ],
)
def test_every_form_of_a_comparison_is_seen(line: str) -> None:
    assert compares_names(line)
    assert not compares_names("torch.autocast(x.device.type); x.device.type not in mode.devices; name == 'cpu'")


@pytest.mark.parametrize(
    ("name", "index"),
    [("cpu", None), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)],
)
def test_devices_that_exist_are_found(monkeypatch: pytest.MonkeyPatch, name: str, index: int | None) -> None:
    pretend_gpus(monkeypatch, 2)
    assert find_device(name) == torch.device(name.partition(":")[0], index)


def test_cuda_is_the_gpu_of_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 2)
    assert find_device("cuda", local_rank=1) == torch.device("cuda", 1)
    assert find_device("cuda:0", local_rank=1) == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "gpus", "reason"),
    [
        ("cuda:2", 2, "torch finds 2 GPUs, cuda:0 to cuda:1"),
        ("cuda:1", 1, "torch finds one GPU, cuda:0"),
        ("mps", 1, "speccompile has no kernels for 'mps'"),
        ("tpu:0", 1, "speccompile has no kernels for 'tpu'"),
        ("gpu", 1, "it is not the name of a device"),
        ("cuda:", 1, "it is not the name of a device"),
        ("cuda:-1", 1, "it is not the name of a device"),
    ],
)
def test_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, gpus: int, reason: str) -> None:
    pretend_gpus(monkeypatch, gpus)
    with raises(UnknownDevice, name=name, reason=reason):
        find_device(name)


def test_without_a_gpu_the_error_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    with raises(UnknownDevice, name="cuda", reason=f"torch {torch.__version__} is built without CUDA"):
        find_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with raises(UnknownDevice, reason=f"torch {torch.__version__} finds no GPU: check nvidia-smi"):
        find_device("cuda")
    pretend_gpus(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with raises(UnknownDevice, reason=re.compile("cannot use it .* check the driver")):
        find_device("cuda")


def test_a_gpu_is_unused_only_beside_a_model_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 2)
    assert unused_gpu(torch.device("cpu")) == "torch finds 2 GPUs"
    assert unused_gpu(torch.device("cuda", 0)) is None
    pretend_gpus(monkeypatch, 0)
    assert unused_gpu(torch.device("cpu")) is None
