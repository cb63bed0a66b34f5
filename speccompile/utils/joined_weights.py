"""Weights of a model side by side in memory, so one product reads several of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn

from speccompile.utils.torch_private import StorageReference


class JoinedWeights:
    """Moves parameters of a model into joined tensors. A moved parameter stays the same object with the same values,
    and becomes a part of the joined memory. There is only one copy, so a change in place changes the joined tensor.

    Args:
        model: the owner of the parameters; None without any.
        in_use: addresses of weights that other executables read. These weights are not moved.
    """

    def __init__(self, model: nn.Module | None = None, in_use: Collection[int] = ()) -> None:
        self._in_use = in_use
        self._parameters: dict[str, nn.Parameter] = {}
        self._tensors: list[torch.Tensor] = []
        if model is not None:
            self._parameters = dict(model.named_parameters(remove_duplicate=False))
            self._tensors = list({id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}.values())
        self._moved: set[int] = set()

    def refusal(self, paths: Sequence[str], values: Sequence[torch.Tensor]) -> str | None:
        """Return the reason why the weights at ``paths`` cannot be joined; None if they can be.

        Args:
            values: the tensor that steps read for each path.
        """
        for path, value in zip(paths, values, strict=True):
            weight = self._parameters.get(path)
            if weight is None or weight.data_ptr() != value.data_ptr() or weight.shape != value.shape:
                return "they are not the model's own parameters"
            if type(weight) is not nn.Parameter or weight.is_inference() or not weight.is_contiguous():
                return "they are not plain tensors"
        weights = [self._parameters[path] for path in paths]
        if len({(weight.dtype, weight.shape[1:]) for weight in weights}) > 1:
            return "their inputs or dtypes differ"
        if len(set(map(id, weights))) < len(weights):
            return "one of them occurs twice"
        if _joined(weights) is not None:
            return None
        if any(id(weight) in self._moved for weight in weights):
            return "one of them is joined with others"
        if any(weight.data_ptr() in self._in_use for weight in weights):
            return "another speculator reads them: close it and call rebuild()"
        if any(_overlap(weight, other) for weight in weights for other in self._tensors if other is not weight):
            return "they share memory with other weights"
        return None

    def join(self, paths: Sequence[str], aliases: Iterable[torch.Tensor]) -> torch.Tensor:
        """Join the weights at ``paths`` along the first dimension, in their order, and return the tensor.

        Args:
            paths: weights without :meth:`refusal`.
            aliases: other tensors of this process. A view of a whole weight moves with it.
        """
        weights = [self._parameters[path] for path in paths]
        joined = _joined(weights)
        if joined is None:
            # Created outside of inference mode: a tensor of inference mode cannot be trained.
            with torch.inference_mode(False), torch.no_grad():
                joined = torch.cat([weight.detach() for weight in weights])
                known = {_address(weight): part for weight, part in zip(weights, _parts(joined, weights), strict=True)}
                for tensor in (*aliases, *weights):
                    if (part := known.get(_address(tensor))) is not None:
                        tensor.data = part
        self._moved |= set(map(id, weights))
        return joined


#: Storages of joined tensors, by their address. A storage lives as long as one of its parts does.
_storages: dict[int, StorageReference] = {}


def _parts(joined: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a tensor over the memory of each weight, with its own storage. Code that saves models treats weights with
    one storage as tied, and a part of a storage as incomplete."""
    whole = joined.untyped_storage()
    for address in [address for address, reference in _storages.items() if reference.storage() is None]:
        del _storages[address]
    _storages[whole.data_ptr()] = StorageReference(whole)
    parts, begin = [], 0
    for weight in weights:
        end = begin + weight.nbytes
        parts.append(joined.new_empty(0).set_(whole[begin:end], 0, weight.shape, weight.stride()))
        begin = end
    return parts


def _joined(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one tensor of all weights if they are already the parts of one, else None."""
    first = weights[0].detach()
    reference = _storages.get(first.data_ptr())
    whole = None if reference is None else reference.storage()
    if whole is None or whole.nbytes() != sum(weight.nbytes for weight in weights):
        return None
    end = first.data_ptr()
    for weight in weights:
        if weight.data_ptr() != end:
            return None
        end += weight.nbytes
    return first.new_empty(0).set_(whole, 0, (sum(map(len, weights)), *first.shape[1:]), first.stride())


def _address(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    begin, end = one.data_ptr(), one.data_ptr() + one.nbytes
    # A view with gaps counts as its whole storage.
    memory = other if other.is_contiguous() else other.untyped_storage()
    size = other.nbytes if other.is_contiguous() else other.untyped_storage().nbytes()
    return one.device == other.device and begin < memory.data_ptr() + size and memory.data_ptr() < end
