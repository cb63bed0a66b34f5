"""Names of devices: ``cpu``, ``cuda``, ``cuda:1``. This module does not import torch, for the command line."""

from __future__ import annotations

import re

from speccompile.errors import UnknownDevice

_NAME = re.compile(r"cpu|cuda(:\d{1,4})?")
#: Types of devices of torch that speccompile has no kernels for.
_OTHERS = ("hpu", "mps", "npu", "tpu", "xla", "xpu")


def check_device_name(name: str) -> None:
    """Check that ``name`` names a device that speccompile runs on. It does not check whether this machine has it.

    Raises:
        UnknownDevice: ``name`` is another device, or no device.
    """
    if _NAME.fullmatch(name):
        return
    kind = name.partition(":")[0].lower()
    reason = f"speccompile has no kernels for {kind!r}" if kind in _OTHERS else "it is not the name of a device"
    raise UnknownDevice(name=name, reason=reason)
