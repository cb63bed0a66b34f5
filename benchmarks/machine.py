"""What a measurement depends on besides the code."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def describe() -> dict[str, Any]:
    """Versions, CPU and threads."""
    return {
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("speccompile", "torch", "transformers")},
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    # platform.processor() is empty or just an architecture on Linux.
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
