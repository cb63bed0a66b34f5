"""Rotary tables that depend on the length of the longest sequence. They are captured in one regime, or refused.

transformers recomputes them in the forward (``dynamic_rope_update`` in modeling_rope_utils.py): ``dynamic`` when a
sequence becomes longer than the original length, ``longrope`` by a switch between two tables there. Up to the original
length both keep one table.
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
    """Yield path, module, layer type (None if there is one table) and type of each rotary table that may change."""
    for path, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                yield path, module, layer_type, kind


def rotary_border(model: PreTrainedModel) -> tuple[int, str, str] | None:
    """Tokens of the longest sequence that changes no rotary table, with path and type of the table that a longer one
    changes; None if no table changes."""
    borders: list[tuple[int, str, str]] = []
    for path, module, layer_type, kind in _changing(model):
        parameters = module.config.rope_parameters
        parameters = parameters if layer_type is None else parameters[layer_type]
        border = parameters["original_max_position_embeddings"] if kind == "longrope" else module.original_max_seq_len
        borders.append((border, path, kind))
    return min(borders, default=None)


def check_rotary(model: PreTrainedModel, max_len: int) -> None:
    """Check that no sequence of at most ``max_len`` tokens changes a rotary table.

    Raises:
        UnsupportedModel: a longer sequence would.
    """
    border = rotary_border(model)
    if border is not None and max_len > border[0]:
        limit, path, kind = border
        raise UnsupportedModel(
            model=type(model).__name__,
            reason=f"the rotary table of {path} ({kind}) changes when a sequence becomes longer than {limit} tokens; "
            f"use max_len <= {limit} (now {max_len})",
        )


def changing_tables(model: PreTrainedModel) -> set[str]:
    """Return names of the buffers that the model's own forward may rewrite. A captured graph keeps copies of them."""
    names = set()
    for path, _, layer_type, _ in _changing(model):
        prefix = f"{path}." if layer_type is None else f"{path}.{layer_type}_"
        # After a reset both names refer to one tensor, and export may use either.
        names |= {f"{prefix}inv_freq", f"{prefix}original_inv_freq"}
    return names


def changing_modules(model: nn.Module) -> set[str]:
    """Return paths of the modules that hold such tables: their own forward assigns to their attributes."""
    return {path for path, *_ in _changing(model)}


def settle_rotary(model: PreTrainedModel) -> None:
    """Run a short sequence, which resets the tables to those of sequences up to the border."""
    if changing_tables(model):
        with torch.no_grad():
            model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.device), use_cache=False)


@contextlib.contextmanager
def fixed_rotary(model: PreTrainedModel) -> Iterator[None]:
    """Let the forward read its rotary tables unchanged, without recomputing them, in this context."""
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
