"""Devices differ by traits; a comparison with a device's name stands only where torch's own API of it is called."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import speccompile
from speccompile.utils.devices import TRAITS, traits_of

PACKAGE = Path(speccompile.__file__).parent
#: They call torch.cuda, name the machine, or list what runs on a device of that type.
API = {"utils/streams.py", "utils/machine.py", "lowering/kernel_list.py"}


def test_traits_are_those_of_the_kind_of_device() -> None:
    assert traits_of(torch.device("cpu")).host_memory and not traits_of(torch.device("cpu")).asynchronous
    assert traits_of(torch.device("cuda", 1)) is TRAITS["cuda"] and TRAITS["cuda"].latent_attention
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
