"""Speculators with MTP modules."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from speccompile import Speculator, wrap

MAX_LEN = 128
MODULES = 3


def mtp(model: PreTrainedModel, head: Any, mode: str = "mtp", **options: Any) -> Speculator:
    sizes: dict[str, Any] = {"tiers": (0, 1, 3), "max_batch": 4, "max_len": MAX_LEN, "backend": "eager"}
    options = sizes | options
    return wrap(model, mode, draft=head, **({"policy": f"fixed:{max(options['tiers'])}"} | options))
