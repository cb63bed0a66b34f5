"""``wrap(free_originals=True)``: packed weights replace the model's own, and only one copy of them remains.

Weights in the form ``same`` can be restored from their packs, so each is freed when it is packed. Rounded weights
cannot: the model's own stay until the wrap has passed its checks, and if it fails they stay.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from speccompile.errors import OriginalsFreed
from speccompile.ops.cpu.packing import Pack
from speccompile.utils.memory import release_file_pages, trim_heap

#: Whether reading a rounded weight returns its substitute, see :func:`standing_in`.
_STANDING_IN: ContextVar[bool] = ContextVar("standing_in", default=False)


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Within it, reading a rounded weight returns a substitute of its shape and unpacks nothing. For code that replaces
    what is computed with the weight.
    """
    token = _STANDING_IN.set(True)
    try:
        yield
    finally:
        _STANDING_IN.reset(token)


class Unpack(nn.Module):
    """Parametrizes a weight by its pack.

    Each read of the weight unpacks a new copy. It cannot be assigned to. The parameter has the pack as its storage; if
    that is rounded it has none, since a parameter keeps its dtype.

    Args:
        shape: of the weight. That of some experts is a matrix.
        stand_in: see :func:`standing_in`; None unless the pack rounds.
    """

    def __init__(self, pack: Pack, shape: torch.Size, stand_in: torch.Tensor | None = None) -> None:
        super().__init__()
        self._registering: tuple[torch.Tensor, ...] | None = pack.tensors
        # The parameter holds the tensor of a pack that does not round, and may move.
        self._pack = pack if pack.form.rounds else replace(pack, tensors=())
        self._shape, self._stand_in = shape, stand_in

    def forward(self, original: torch.Tensor) -> torch.Tensor:
        if self._stand_in is not None and _STANDING_IN.get():
            return self._stand_in
        # A change in place would be lost with the copy. In inference mode torch forbids it, but that has no gradients.
        with contextlib.nullcontext() if torch.is_grad_enabled() else torch.inference_mode():
            return self.unpacked(original)

    def unpacked(self, original: torch.Tensor) -> torch.Tensor:
        pack = self._pack if self._pack.tensors else replace(self._pack, tensors=(original,))
        return pack.unpacked_original(original.dtype, self._shape)

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        """The parameter's storage. torch calls this once at registration, and again at each assignment of a weight."""
        packed, self._registering = self._registering, None
        if packed is None:
            raise OriginalsFreed(what="its weights cannot be assigned to")
        return weight.new_empty(0) if self._pack.form.rounds else packed[0]


def originals_freed(model: nn.Module) -> bool:
    """Whether ``wrap(free_originals=True)`` has packed the weights of ``model``."""
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


@dataclass(frozen=True)
class _Taken:
    """A weight that its pack has replaced. ``own`` holds the model's values as long as they may be restored, if the
    pack does not have them.
    """

    owners: list[_Owner]
    own: torch.Tensor | None


class FreedOriginals:
    """The weights of a model that one wrap has replaced by their packs."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._taken: list[_Taken] = []
        self._handles: list[Any] = []

    def take(self, path: str, pack: Pack) -> torch.Tensor | None:
        """Replace the weight at ``path`` by its pack, in all modules that share it. Returns its substitute, see
        :func:`standing_in`, if the pack rounds.
        """
        owners = self._owners(path)
        old = getattr(owners[0].module, owners[0].name).detach()
        rounds = pack.form.rounds
        # What is computed with it by mistake is NaN.
        stand_in = old.new_full((1, 1), torch.nan).expand(old.shape) if rounds else None
        self._taken.append(_Taken(owners, old if rounds else None))
        held = replace(pack, weight=None)
        for owner in owners:
            owner.parametrize(Unpack(held, old.shape, stand_in))
            self._handles.append(owner.module.register_state_dict_post_hook(_UnpackState(owner.name)))
            self._handles.append(owner.module.register_load_state_dict_pre_hook(_refuse_to_load))
        if not rounds:
            release_file_pages(old)
            # Returns the memory of the previous weight: the caller may still hold this one.
            trim_heap()
        return stand_in

    def settle(self) -> None:
        """Drop the model's values: the wrap has succeeded."""
        for index, taken in enumerate(self._taken):
            if taken.own is not None:
                release_file_pages(taken.own)
                self._taken[index] = _Taken(taken.owners, None)
        trim_heap()

    def release_unread(self) -> None:
        """Release the pages of mapped files that a forward has read. Packing reads them again, weight by weight."""
        for weight in self._model.parameters():
            release_file_pages(weight.detach())

    def undo(self) -> None:
        """Restore the model's unpacked weights, one after the other."""
        while self._taken:
            owners = [owner for owner in self._taken[-1].owners if owner.parametrized]
            if owners:
                own, parameter = self._taken[-1].own, owners[0].original
                unpacked_weight = owners[0].unpacked_weight if own is None else own
                for owner in owners:
                    parametrize.remove_parametrizations(owner.module, owner.name, leave_parametrized=False)
                parameter.data = unpacked_weight
            self._taken.pop()
        while self._handles:
            self._handles.pop().remove()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors that the weights' parameters now hold, by all names that the model has for them."""
        owners = itertools.chain.from_iterable(taken.owners for taken in self._taken)
        return {owner.original_path: owner.original.detach() for owner in owners}

    def _owners(self, path: str) -> list[_Owner]:
        tensors = [
            *self._model.named_parameters(remove_duplicate=False),
            *self._model.named_buffers(remove_duplicate=False),
        ]
        weight = dict(tensors)[path]
        places = [name.rpartition(".") for name, tensor in tensors if tensor is weight]
        return [_Owner(module, self._model.get_submodule(module), name) for module, _, name in places]


class _UnpackState:
    """Hook of ``state_dict`` for saving the model: a freed weight has its own name and form there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: nn.Module, state: dict[str, torch.Tensor], prefix: str, _metadata: object) -> None:
        del state[f"{prefix}parametrizations.{self._name}.original"]
        state[f"{prefix}{self._name}"] = _Owner("", module, self._name).unpacked_weight


def _refuse_to_load(*_arguments: object) -> None:
    raise OriginalsFreed(what="its weights cannot be loaded anew")


@contextlib.contextmanager
def freeing_originals(model: nn.Module, enabled: bool) -> Iterator[FreedOriginals | None]:
    """The owner of the weights that a wrap of ``model`` packs, None unless ``enabled``. It restores them if the wrap
    fails."""
    if not enabled:
        yield None
        return
    freed = FreedOriginals(model)
    try:
        yield freed
    except BaseException:
        freed.undo()
        raise
    freed.settle()
