"""GPUs that torch seems to find, for code that chooses a device and computes nothing there."""

from __future__ import annotations

import pytest
import torch

#: The name that each of them has.
NAME = "NVIDIA H100 80GB HBM3"


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let torch report ``count`` GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: NAME)


def pretend_memory(monkeypatch: pytest.MonkeyPatch, *, free: int, total: int, kept: int = 0) -> None:
    """Let every device have so many bytes, ``kept`` of them in torch's cache beside the free ones."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: kept)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
