"""Weights of a model side by side in memory, so that one product reads several of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn

from speccompile.utils.torch_private import StorageReference


class JoinedWeights:
    """Moves parameters of a model into joined tensors. A parameter that is moved stays the same object with the same
    values: it becomes a part of the joined memory. There is one copy, and a change in place is a change of the joined
    tensor.

    Args:
        model: the owner of the parameters; None if there are none.
        in_use: addresses of weights that other executables read. These weights stay where they are.
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
        """The reason for which the weights at ``paths`` cannot be joined, None if they can be.

        Args:
            values: what steps read of each.
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
        """The weights at ``paths`` as one tensor, each after the one before it along the first dimension.

        Args:
            paths: of weights without :meth:`refusal`.
            aliases: other tensors of this process. Those that are views of a whole weight follow it.
        """
        weights = [self._parameters[path] for path in paths]
        joined = _joined(weights)
        if joined is None:
            # A tensor of inference mode could not be trained any more.
            with torch.inference_mode(False), torch.no_grad():
                joined = torch.cat([weight.detach() for weight in weights])
                known = {_place(weight): part for weight, part in zip(weights, _parts(joined, weights), strict=True)}
                for tensor in (*aliases, *weights):
                    if (part := known.get(_place(tensor))) is not None:
                        tensor.data = part
        self._moved |= set(map(id, weights))
        return joined


#: The storages of joined tensors, by their address. A storage lives as long as one of its parts does.
_storages: dict[int, StorageReference] = {}


def _parts(joined: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A tensor over the memory of each weight, with its own storage: what saves models takes weights of one storage for
    tied ones, and a part of it for incomplete."""
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
    """One tensor of all weights, if they are the parts of one already."""
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


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    begin, end = one.data_ptr(), one.data_ptr() + one.nbytes
    # A view with gaps counts as its whole storage.
    memory = other if other.is_contiguous() else other.untyped_storage()
    size = other.nbytes if other.is_contiguous() else other.untyped_storage().nbytes()
    return one.device == other.device and begin < memory.data_ptr() + size and memory.data_ptr() < end
