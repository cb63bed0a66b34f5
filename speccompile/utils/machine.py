"""Properties of the machine that compiled code depends on."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from speccompile.utils.instruction_sets import instruction_sets
from speccompile.utils.storage import digest
from speccompile.utils.torch_private import inductor_config


def machine(device: torch.device) -> dict[str, str]:
    """Return names and values. Code compiled with another value of one of them may be slow, wrong, or not run."""
    if device.type == "cpu":
        # The detection changes Inductor's settings for a moment.
        instruction_sets().join()
    known = {
        "processor": platform.machine(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "instruction sets": _instruction_sets(),
        "torch threads": str(torch.get_num_threads()),
        "torch default dtype": str(torch.get_default_dtype()),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "Inductor settings": digest(repr(sorted(inductor_config.save_config_portable().items())))[:16],
    }
    if device.type == "cuda":
        known["GPU"] = torch.cuda.get_device_name(device)
    return known


def device_name(device: torch.device) -> str:
    """The name of what computes on ``device``, for people who read a measurement: a GPU, or a CPU and its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {torch.get_num_threads()} threads"


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The name of the CPU, for people who read a measurement."""
    # platform.processor() is empty or only an architecture on Linux.
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _instruction_sets(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    # Inductor compiles for this exact CPU; torch's own capability only names a class of CPUs.
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            name, _, flags = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return digest(" ".join(sorted(flags.split())))[:16]
    return platform.processor()
