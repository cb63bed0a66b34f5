"""Facts about the machine of a run."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import Any

import torch

from speccompile.utils.machine import processor_name


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Versions, processor and threads. ``name`` is equal for machines whose times can be compared."""
    processor, threads = processor_name(), torch.get_num_threads()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{processor}, {threads} threads"
    return {
        "name": name,
        "device": device.type,
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": threads,
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in ("speccompile", "torch", "transformers")},
    }
