"""Devices differ by traits; a comparison with a device's name stands only where torch's own API of it is called."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import speccompile
from speccompile.utils.devices import TRAITS, traits_of

PACKAGE = Path(speccompile.__file__).parent
#: They call torch.cuda, name the machine, or list what runs on a device of that type.
API = {"utils/streams.py", "utils/machine.py", "lowering/kernel_list.py"}


def test_traits_are_those_of_the_kind_of_device() -> None:
    assert traits_of(torch.device("cpu")).host_memory and not traits_of(torch.device("cpu")).asynchronous
    assert traits_of(torch.device("cuda", 1)) is TRAITS["cuda"]
    other = traits_of(torch.device("meta"))
    assert not (other.host_memory or other.asynchronous or other.cpp_ops or other.triton_ops)


def test_code_asks_for_traits() -> None:
    asks = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\.is_cuda\b|device[._]type (==|!=) \"", path.read_text())
    }
    assert asks <= API
