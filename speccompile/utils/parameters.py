"""Parameters of a model, with all modules that share them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers.pytorch_utils import Conv1D

#: Modules and the names that a parameter has in them.
Owners = Sequence[tuple[nn.Module, str]]


def owners_by_parameter(model: nn.Module) -> dict[int, Owners]:
    """The owners of each parameter of ``model``, by its ``id``. Tied weights have several."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), []).append((module, name))
    return dict(found)


def put_parameter(owners: Owners, parameter: nn.Parameter) -> None:
    """Replace the parameter of ``owners`` by ``parameter``."""
    for module, name in owners:
        module._parameters[name] = parameter


def lie_transposed(module: nn.Module) -> bool:
    """Whether its weights have inputs before outputs: GPT-2's linears, and experts that transformers marks so."""
    return isinstance(module, Conv1D) or bool(getattr(module, "is_transposed", False))


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and buffers of ``model``. Shared ones count once."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta)
