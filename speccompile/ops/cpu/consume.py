"""``wrap(consume=True)``: packed weights replace the model's own, so that there is one copy of them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from speccompile.errors import ModelConsumed
from speccompile.ops.cpu.forms.same import unpack
from speccompile.utils.memory import release_file_pages, trim_heap


class Unpack(nn.Module):
    """Parametrizes a weight ``[features, K]``, or ``[K, features]`` if ``transposed``, by its pack.

    Each read of the weight unpacks a new copy. It cannot be assigned to.
    """

    def __init__(self, packed: torch.Tensor, features: int, *, transposed: bool) -> None:
        super().__init__()
        self._registering: torch.Tensor | None = packed
        self._features, self._transposed = features, transposed

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        # A change in place would be lost with the copy. In inference mode torch forbids it, but that has no gradients.
        with contextlib.nullcontext() if torch.is_grad_enabled() else torch.inference_mode():
            return self.unpacked(packed)

    def unpacked(self, packed: torch.Tensor) -> torch.Tensor:
        weight = unpack(packed, self._features)
        return weight.t().contiguous() if self._transposed else weight

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        """The pack. torch calls this once at registration, and again at each assignment of a weight."""
        packed, self._registering = self._registering, None
        if packed is None:
            raise ModelConsumed(what="its weights cannot be assigned to")
        return packed


def is_consumed(model: nn.Module) -> bool:
    """Whether ``wrap(consume=True)`` has packed the weights of ``model``."""
    return any(isinstance(module, Unpack) for module in model.modules())


@dataclass(frozen=True)
class _Owner:
    """A module, at ``path``, that has the weight as its attribute ``name``."""

    path: str
    module: nn.Module
    name: str

    @property
    def parametrized(self) -> bool:
        return parametrize.is_parametrized(self.module, self.name)

    @property
    def original(self) -> torch.Tensor:
        parametrizations: Any = self.module.parametrizations
        original: torch.Tensor = parametrizations[self.name].original
        return original

    @property
    def unpacked_weight(self) -> torch.Tensor:
        """The weight, unpacked."""
        parametrizations: Any = self.module.parametrizations
        unpacked: torch.Tensor = parametrizations[self.name][0].unpacked(self.original.detach())
        return unpacked

    @property
    def original_path(self) -> str:
        return f"{self.path}.parametrizations.{self.name}.original".removeprefix(".")

    def parametrize(self, unpack: Unpack) -> None:
        # Unsafe means that shapes may differ. torch puts the pack into the parameter itself, which tied modules share.
        parametrize.register_parametrization(self.module, self.name, unpack, unsafe=True)


class ConsumedWeights:
    """The weights of a model that one wrap has replaced by their packs."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._taken: list[list[_Owner]] = []
        self._handles: list[Any] = []

    def take(self, path: str, packed: torch.Tensor, features: int, *, transposed: bool) -> None:
        """Make ``packed`` the storage of the weight at ``path``, in all modules that share it."""
        owners = self._owners(path)
        old = getattr(owners[0].module, owners[0].name).detach()
        self._taken.append(owners)
        for owner in owners:
            owner.parametrize(Unpack(packed, features, transposed=transposed))
            self._handles.append(owner.module.register_state_dict_post_hook(_UnpackState(owner.name)))
            self._handles.append(owner.module.register_load_state_dict_pre_hook(_refuse_to_load))
        release_file_pages(old)
        # Returns the memory of the previous weight: the caller may still hold this one.
        trim_heap()

    def release_unread(self) -> None:
        """Release the pages of mapped files that a forward has read. Packing reads them again, weight by weight."""
        for weight in self._model.parameters():
            release_file_pages(weight.detach())

    def undo(self) -> None:
        """Restore the model's unpacked weights, one after the other."""
        while self._taken:
            owners = [owner for owner in self._taken[-1] if owner.parametrized]
            if owners:
                parameter, unpacked_weight = owners[0].original, owners[0].unpacked_weight
                for owner in owners:
                    parametrize.remove_parametrizations(owner.module, owner.name, leave_parametrized=False)
                parameter.data = unpacked_weight
            self._taken.pop()
        while self._handles:
            self._handles.pop().remove()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The packs, by all names that the model now has for them."""
        return {owner.original_path: owner.original.detach() for owner in itertools.chain(*self._taken)}

    def _owners(self, path: str) -> list[_Owner]:
        tensors = [
            *self._model.named_parameters(remove_duplicate=False),
            *self._model.named_buffers(remove_duplicate=False),
        ]
        weight = dict(tensors)[path]
        places = [name.rpartition(".") for name, tensor in tensors if tensor is weight]
        return [_Owner(module, self._model.get_submodule(module), name) for module, _, name in places]


class _UnpackState:
    """A hook of ``state_dict``: a consumed weight has its own name and form there, so that the model can be saved."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: nn.Module, state: dict[str, torch.Tensor], prefix: str, _metadata: object) -> None:
        del state[f"{prefix}parametrizations.{self._name}.original"]
        state[f"{prefix}{self._name}"] = _Owner("", module, self._name).unpacked_weight


def _refuse_to_load(*_arguments: object) -> None:
    raise ModelConsumed(what="its weights cannot be loaded anew")


@contextlib.contextmanager
def consuming(model: nn.Module, enabled: bool) -> Iterator[ConsumedWeights | None]:
    """The owner of the weights that a wrap of ``model`` packs, None unless ``enabled``. It restores them if the wrap
    fails."""
    if not enabled:
        yield None
        return
    consumed = ConsumedWeights(model)
    try:
        yield consumed
    except BaseException:
        consumed.undo()
        raise
