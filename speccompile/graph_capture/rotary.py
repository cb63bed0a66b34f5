"""Rotary tables that depend on how long the longest sequence is: captured in one regime, or refused.

transformers recomputes them in the forward (``dynamic_rope_update`` in modeling_rope_utils.py): ``dynamic`` when a text
outgrows the original length, ``longrope`` by switching between two tables there. Up to the original length both
keep one table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.errors import UnsupportedModel


def _changing(model: nn.Module) -> Iterator[tuple[str, Any, str | None, str]]:
    """Path, module, layer type (None where there is one table) and type of each rotary table that may change."""
    for path, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                yield path, module, layer_type, kind


def check_rotary(model: PreTrainedModel, max_len: int) -> None:
    """Raises UnsupportedModel if a text of ``max_len`` tokens would change a rotary table on its way."""
    borders: list[tuple[int, str, str]] = []
    for path, module, layer_type, kind in _changing(model):
        parameters = module.config.rope_parameters
        parameters = parameters if layer_type is None else parameters[layer_type]
        border = parameters["original_max_position_embeddings"] if kind == "longrope" else module.original_max_seq_len
        borders.append((border, path, kind))
    limit, path, kind = min(borders, default=(max_len, "", ""))
    if max_len > limit:
        raise UnsupportedModel(
            model=type(model).__name__,
            reason=f"the rotary table of {path} ({kind}) changes when a text grows beyond {limit} tokens; "
            f"use max_len <= {limit} (now {max_len})",
        )


def changing_tables(model: PreTrainedModel) -> set[str]:
    """Names of the buffers that the model's own forward may rewrite: a captured graph keeps copies of them."""
    names = set()
    for path, _, layer_type, _ in _changing(model):
        prefix = f"{path}." if layer_type is None else f"{path}.{layer_type}_"
        # After a reset both names are one tensor, and export may call it by either.
        names |= {f"{prefix}inv_freq", f"{prefix}original_inv_freq"}
    return names


def changing_modules(model: nn.Module) -> set[str]:
    """Paths of the modules that hold such tables: their own forward assigns to their attributes."""
    return {path for path, *_ in _changing(model)}


def settle_rotary(model: PreTrainedModel) -> None:
    """Run a short text, which brings the tables back to what texts up to the border use."""
    if changing_tables(model):
        with torch.no_grad():
            model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.device), use_cache=False)


@contextlib.contextmanager
def fixed_rotary(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the forward reads its rotary tables as they are and does not recompute them."""
    modules: list[nn.Module] = [module for _, module, _, _ in _changing(model)]
    before = [(module, module.rope_type) for module in modules]
    try:
        for module, kinds in before:
            fixed = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
            module.rope_type = fixed  # type: ignore[assignment]
        yield
    finally:
        for module, kinds in reversed(before):
            module.rope_type = kinds
