"""Facts about the machine of a run."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import Any

import torch

from speccompile.utils.machine import device_name, processor_name


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Versions, processor and threads. ``name`` is equal for machines whose times can be compared."""
    return {
        "name": device_name(device),
        "device": device.type,
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in ("speccompile", "torch", "transformers")},
    }
