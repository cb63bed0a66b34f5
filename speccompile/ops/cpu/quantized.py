"""Packs of a quantised checkpoint in the place of the model's own weights: ``wrap(weights=QuantizedWeights(...))``."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn

from speccompile.errors import InvalidOption, OriginalsFreed
from speccompile.ops.cpu.forms import FORMS
from speccompile.ops.cpu.forms.grouped import pack_grouped
from speccompile.ops.cpu.packing import Pack
from speccompile.quantized.experts import joined_experts
from speccompile.quantized.packed_weight import PackedWeight, PackedWeights
from speccompile.quantized.source import TensorSource
from speccompile.quantized.weight import GroupedWeight, QuantizedWeights
from speccompile.utils.memory import release_file_pages, trim_heap
from speccompile.utils.parameters import Owners, lie_transposed, owners_by_parameter, put_parameter
from speccompile.utils.weight_forms import Forms, QuantizedForms, Weights

#: Functions with which a forward reads a weight.
_READERS = frozenset((F.linear, F.embedding, torch.addmm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__))
#: Names of those with which transformers reads weights of experts.
_READERS_OF_EXPERTS = frozenset(("bmm", "grouped_mm", "_grouped_mm", "grouped_mm_fallback"))


class QuantizedParameter(nn.Parameter):
    """A parameter whose values are in a pack. All of its elements are one NaN in memory.

    A forward of the model itself that reads it is refused; ``spec(input_ids)`` and ``spec.check`` compute with the
    pack.
    """

    pack: Pack
    #: Attributes of :class:`QuantizedPacks`.
    folder: str
    others: Forms
    #: Whether its modules have the hooks that dequantise it for a state dict.
    hooked: bool

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _READERS or func.__name__ in _READERS_OF_EXPERTS or _reads_experts(func, args):
            raise OriginalsFreed(what="call spec(input_ids) for its forward")
        return super().__torch_function__(func, types, args, kwargs or {})

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise OriginalsFreed(what="it cannot be copied")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise OriginalsFreed(what="it cannot be pickled; save_pretrained writes its weights, dequantised")


def _reads_experts(func: Any, args: Sequence[Any]) -> bool:
    """Whether it is an index of one or some experts. A slice is a view, as the package's op reads it."""
    return func is torch.Tensor.__getitem__ and not isinstance(args[1], slice)


def values_of(weight: torch.Tensor) -> torch.Tensor:
    """The values that ``weight`` has or, if they are in a pack, stands for: then a new tensor of its dtype."""
    pack: Pack | None = getattr(weight, "pack", None)
    if pack is None:
        return weight.detach()
    return pack.unpacked_original(weight.dtype, weight.shape)


def is_quantized(model: nn.Module) -> bool:
    """Whether a weight of ``model`` is only in a pack."""
    return any(isinstance(parameter, QuantizedParameter) for parameter in model.parameters())


def is_of_folder(model: nn.Module) -> bool:
    """Whether the weights of ``model`` are those of a packed folder, also while it is wrapped."""
    return any(getattr(parameter, "folder", "") for parameter in model.parameters())


@dataclass(frozen=True)
class _Original:
    """A parameter as it was before the wrap.

    Args:
        before: itself on the meta device, or its one element if an earlier wrap holds its values; else None.
    """

    owners: Owners
    parameter: nn.Parameter
    before: nn.Parameter | torch.Tensor | None
    pack: Pack | None


class QuantizedPacks(QuantizedForms):
    """The quantised weights of a wrap, and the parameters that stand for them in the model.

    :func:`quantizing` calls :meth:`prepare`, and in the end :meth:`seal`, or :meth:`undo` after a failure. Between them
    :meth:`install` is called.

    Args:
        format: of the checkpoint.
        weights: by names of the model's parameters. Each one is looked up once, when it is packed.
        packs: those that exist already, by the same names.
        others: the forms of all other weights.
        folder: hash of the packed folder that has all weights of the model; empty if they come from elsewhere.
    """

    def __init__(
        self,
        format: str,
        weights: Mapping[str, GroupedWeight] | Mapping[str, PackedWeight],
        packs: Mapping[str, Pack],
        others: Forms = "same",
        folder: str = "",
    ) -> None:
        self.format, self.others, self.folder = format, others, folder
        self._weights: Mapping[str, GroupedWeight] | Mapping[str, PackedWeight] = weights
        self._names = (*weights, *packs)
        self._packs: dict[str, Pack] = dict(packs)
        #: By the address of the element that stands for all of a parameter. Packs hold it, so it stays theirs.
        self._by_address = {pack.weight.data_ptr(): pack for pack in packs.values() if pack.weight is not None}
        self._orders: dict[bytes, torch.Tensor] = {}
        self._taken: dict[str, _Original] = {}

    @staticmethod
    def of_weights(weights: QuantizedWeights | PackedWeights) -> QuantizedPacks:
        """Those of a checkpoint."""
        folder = weights.folder if isinstance(weights, PackedWeights) else ""
        return QuantizedPacks(weights.format, weights, {}, weights.others, folder)

    @staticmethod
    def of_model(model: nn.Module) -> QuantizedPacks:
        """The packs that stand for weights of ``model`` since it was loaded, or since an earlier wrap."""
        named = model.named_parameters()
        found = {name: parameter for name, parameter in named if isinstance(parameter, QuantizedParameter)}
        first = next(iter(found.values()))
        packs = {name: parameter.pack for name, parameter in found.items()}
        return QuantizedPacks(first.pack.format, {}, packs, first.others, first.folder)

    def __repr__(self) -> str:
        return f"<{len(self._names)} quantised weights, {self.format}>"

    def __len__(self) -> int:
        return len(self._names)

    @property
    def packs(self) -> Mapping[str, Pack]:
        """By names of parameters."""
        return self._packs

    def find(self, weight: torch.Tensor) -> Pack | None:
        """The pack that ``weight``, a parameter or a view of one, stands for."""
        return self._by_address.get(weight.data_ptr())

    def prepare(self, model: nn.Module) -> None:
        """Find the parameters, and give those on the meta device one element on the CPU.

        Raises:
            InvalidOption: a name is that of no matrix of the model, or a tied one is named twice.
        """
        found = dict(model.named_parameters(remove_duplicate=False))
        names: dict[int, str] = {}
        for name in self._names:
            parameter = found.get(name)
            if parameter is None:
                raise self._refusal(f"the model has no parameter {name!r}; names are those of named_parameters()")
            if parameter.dim() not in (2, 3):
                raise self._refusal(
                    f"{name} has the shape {list(parameter.shape)}, and must be the matrix of a linear or an "
                    "embedding, or those of experts"
                )
            other = names.setdefault(id(parameter), name)
            if other != name:
                raise self._refusal(f"{other} and {name} are one parameter of this model; give one of them")
        owners = owners_by_parameter(model)
        for name in self._names:
            self._taken[name] = _take(found[name], owners[id(found[name])])

    def install(self, model: nn.Module) -> None:
        """Pack the weights, one after another, and release the model's values of them.

        Raises:
            InvalidOption: a weight has another shape than the model's, or reading it raised that.
        """
        for name, taken in self._taken.items():
            parameter = taken.parameter
            pack = self._packs.get(name) or self._packed(name, taken)
            old = parameter.detach()
            assert pack.weight is not None
            # One element, in the model's shape.
            parameter.data = pack.weight.as_strided(parameter.shape, [0] * parameter.dim())
            parameter.pack = pack  # type: ignore[attr-defined]
            if old.data_ptr() != parameter.data_ptr():
                release_file_pages(old)
                del old
                # Freed memory goes back at once: there never are two copies.
                trim_heap()
        # All of them are packed: what they were read from can be freed.
        self._weights = {}

    def seal(self) -> None:
        """The wrap is built: let the model refuse to read the weights, and have their values in its state dict."""
        for taken in self._taken.values():
            parameter: Any = taken.parameter
            parameter.__class__ = QuantizedParameter
            parameter.folder, parameter.others = self.folder, self.others
            if not getattr(parameter, "hooked", False):
                parameter.hooked = True
                for module, name in taken.owners:
                    module.register_state_dict_post_hook(_ValuesInState(name))
                    module.register_load_state_dict_pre_hook(_refuse_to_load)
        self._taken.clear()

    def undo(self) -> None:
        """Restore the model: plain parameters have the dequantised values then."""
        for taken in self._taken.values():
            parameter = taken.parameter
            if isinstance(taken.before, nn.Parameter):
                put_parameter(taken.owners, taken.before)
            elif taken.before is not None:
                parameter.data = taken.before
                parameter.pack = taken.pack  # type: ignore[attr-defined]
                parameter.__class__ = QuantizedParameter
            elif (pack := getattr(parameter, "pack", None)) is not None:
                parameter.data = values_of(parameter)
                del parameter.pack, pack  # type: ignore[attr-defined]
        self._taken.clear()

    def _packed(self, name: str, taken: _Original) -> Pack:
        weight = self._weights[name]
        transposed = _is_transposed(taken) or (isinstance(weight, PackedWeight) and weight.transposed)
        *experts, features, depth = weight.shape
        rows, columns = (depth, features) if transposed else (features, depth)
        # Some families have all experts in one matrix.
        if tuple(taken.parameter.shape) not in ((*experts, rows, columns), (math.prod(experts) * rows, columns)):
            wanted = list(taken.parameter.shape)
            wanted = wanted[::-1] if transposed else wanted
            raise self._refusal(f"{name} is {list(weight.shape)}, and must be {wanted}, as in the model")
        if weight.order is not None and any(isinstance(module, nn.Embedding) for module, _ in taken.owners):
            raise self._refusal(f"{name} has an order of inputs, and must not, since it is an embedding's")
        if isinstance(weight, GroupedWeight):
            form, tensors = pack_grouped(weight)
        else:
            form, tensors = FORMS[weight.form], weight.tensors
        # The element that stood for it on the meta device, which a draft head may share by now.
        old = taken.parameter.detach()
        known = isinstance(taken.before, nn.Parameter)
        element = old if known else torch.full((1, 1), torch.nan, dtype=old.dtype)
        element = element.as_strided(weight.shape, [0] * len(weight.shape))
        pack = Pack(
            form,
            tensors,
            features,
            depth,
            element,
            format=self.format,
            experts=experts[0] if experts else None,
            transposed=transposed,
        )
        if weight.order is not None:
            # Queries, keys and values often have the same: then they read the same inputs.
            pack = replace(pack, order=self._orders.setdefault(weight.order.numpy().tobytes(), weight.order))
        self._packs[name] = self._by_address[element.data_ptr()] = pack
        return pack

    def _refusal(self, reason: str) -> InvalidOption:
        return InvalidOption(where="wrap", name="weights", value=self, reason=reason)


def packs_for(model: nn.Module, weights: Weights) -> QuantizedPacks | None:
    """The packs of a wrap of ``model`` with the option ``weights``: those of a quantised checkpoint, or those that the
    model has already. None: the model's own weights are packed.

    Raises:
        InvalidOption: the weights of the model are packed, and the option would round them.
    """
    if isinstance(weights, QuantizedPacks):
        return weights
    if isinstance(weights, QuantizedWeights) and isinstance(model, nn.Module):
        parameters = {name: found.shape for name, found in model.named_parameters(remove_duplicate=False)}
        return QuantizedPacks.of_weights(joined_experts(weights, parameters, TensorSource(weights.format)))
    if isinstance(weights, QuantizedWeights | PackedWeights):
        return QuantizedPacks.of_weights(weights)
    # Any other object is refused by the plan, with a reason.
    if not isinstance(model, nn.Module) or not is_quantized(model):
        return None
    packs = QuantizedPacks.of_model(model)
    if weights != "same":
        reason = f"the model's weights are packed already ({packs.format}), and are not rounded again; leave it out"
        raise InvalidOption(where="wrap", name="weights", value=weights, reason=reason)
    return packs


@contextlib.contextmanager
def quantizing(model: nn.Module, packs: QuantizedPacks | None) -> Iterator[None]:
    """In this context a wrap of ``model`` is planned and built. A failure restores the model.

    Raises:
        InvalidOption: the weights are not the model's.
    """
    if packs is None:
        yield
        return
    try:
        packs.prepare(model)
        yield
    except BaseException:
        packs.undo()
        raise
    packs.seal()


def _take(parameter: nn.Parameter, owners: Owners) -> _Original:
    """``parameter``, as one that can be captured."""
    if isinstance(parameter, QuantizedParameter) or getattr(parameter, "pack", None) is not None:
        # Another thread may rebuild a speculator over the same weights, which are plain parameters meanwhile.
        parameter.__class__ = nn.Parameter
        return _Original(owners, parameter, parameter.data, getattr(parameter, "pack", None))
    if not parameter.is_meta:
        return _Original(owners, parameter, None, None)
    element = torch.full((1, 1), torch.nan, dtype=parameter.dtype).expand(parameter.shape)
    new = nn.Parameter(element, requires_grad=False)
    put_parameter(owners, new)
    return _Original(owners, new, parameter, None)


def _is_transposed(taken: _Original) -> bool:
    return any(lie_transposed(module) for module, _ in taken.owners)


class _ValuesInState:
    """Hook of ``state_dict`` for saving the model: it returns the dequantised values."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: nn.Module, state: dict[str, torch.Tensor], prefix: str, _metadata: object) -> None:
        state[f"{prefix}{self._name}"] = values_of(module._parameters[self._name])  # type: ignore[arg-type]


def _refuse_to_load(*_arguments: object) -> None:
    raise OriginalsFreed(what="its weights cannot be loaded anew")
