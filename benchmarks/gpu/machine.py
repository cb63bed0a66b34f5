"""Description of what GPU figures depend on: the device, versions, and the revision of the code."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def describe(device: torch.device) -> dict[str, Any]:
    """Device, driver and versions; None for what is not there."""
    found: dict[str, Any] = {
        "device": device_name(device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__}
        | {name: _version(name) for name in ("triton", "transformers", "speccompile")},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
        }
    return found


def revision() -> str:
    """The commit of the source tree, with ``-dirty`` where files have changed; without git a hash of the package."""
    root = Path(__file__).parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, check=False) if shutil.which("git") else None
    if found is not None and found.returncode == 0:
        return found.stdout.strip()
    digest = hashlib.sha256()
    for file in sorted(path for path in (root / "speccompile").rglob("*") if path.suffix in (".py", ".cpp", ".h")):
        digest.update(file.read_bytes())
    return f"sources {digest.hexdigest()[:12]}"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def _version(name: str) -> str | None:
    # A source tree need not be installed.
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return output[0] if output else None
