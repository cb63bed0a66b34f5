"""Draft heads of adapters: each is kept as its difference from the shared head, in buffers like those of adapters.

A LoRA adapter of the shared head is such a difference. A whole head is one, too: the difference of a linear has a rank
of at most the smaller of its sizes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.adapters.buffers import AdaptedLinear, AdaptedVector, AdapterBuffers, LoraPair
from speccompile.adapters.options import FULL, Adapters
from speccompile.adapters.peft_source import is_peft, read_adapter
from speccompile.errors import InvalidAdapter

#: The beginning of the names of state tensors.
SCOPE = "head_"
#: The largest part of a difference, by its norm, that a factorisation of smaller rank may leave out.
TOLERANCE = 1e-5
#: Further columns and iterations of the factorisation.
EXTRA, ITERATIONS = 8, 4
#: Fields of a head's config that only limit the sequences it drafts for.
_LIMITS = ("max_position_embeddings",)


@dataclass(frozen=True)
class HeadChange:
    """The difference of a head from the shared one.

    Args:
        pairs: of its linears, by path. A linear that is not here is the shared one.
        vectors: of all :attr:`~speccompile.adapters.buffers.AdapterBuffers.vectors`, by path: the weight of a norm, or
            what is added to the shared bias.
    """

    pairs: Mapping[str, LoraPair]
    vectors: Mapping[str, torch.Tensor]


def head_buffers(head: nn.Module, model: PreTrainedModel, options: Adapters) -> AdapterBuffers:
    """The buffers for the heads of adapters: of the linears, norms and biases that ``head`` does not share with
    ``model``."""
    shared = {parameter.data_ptr() for parameter in model.parameters()}
    linears = tuple(_linears(head, shared))
    most = max(min(linear.depth, linear.features) for linear in linears)
    rank = most if options.head_rank == FULL else min(int(options.head_rank or 1), most)
    vectors = tuple(_vectors(head, shared, {linear.path for linear in linears}))
    return AdapterBuffers(options.count, rank, linears, next(head.parameters()).dtype, vectors)


def unchanged(buffers: AdapterBuffers, shared: nn.Module) -> HeadChange:
    """The shared head, for an adapter without a head."""
    return HeadChange({}, {vector.path: _value(vector, shared, shared) for vector in buffers.vectors})


def read_head(
    name: str, source: Any, buffers: AdapterBuffers, shared: nn.Module, load: Callable[[Any], nn.Module]
) -> HeadChange:
    """Read the head ``source`` of the adapter ``name``, and compare it with the shared head.

    Args:
        source: a head, or its checkpoint, as ``draft=`` of the mode accepts it; or a LoRA adapter of the shared head:
            a folder that PEFT's ``save_pretrained`` wrote, or a ``PeftModel``.
        shared: the head that was given to ``wrap``.
        load: returns the head of a checkpoint.

    Raises:
        InvalidAdapter: the head is not the shared one with other weights, or its difference exceeds the buffers.
        UserError: ``load`` refuses the checkpoint.
    """
    if is_peft(source):
        return HeadChange(read_adapter(name, source, buffers, shared), unchanged(buffers, shared).vectors)

    def refuse(reason: str) -> InvalidAdapter:
        shown = os.fspath(source) if isinstance(source, str | os.PathLike) else f"a {type(source).__name__}"
        return InvalidAdapter(name=name, source=f"head {shown}", reason=reason)

    head = load(source)
    _check_alike(head, shared, refuse)
    own, known = head.state_dict(), shared.state_dict()
    adapted = {f"{linear.path}.weight" for linear in buffers.linears} | {vector.path for vector in buffers.vectors}
    for key, value in known.items():
        if key not in adapted and not torch.equal(own[key], value):
            raise refuse(f"its {key} must be that of the shared head, since all adapters share it")
    pairs = {}
    for linear in buffers.linears:
        change = own[f"{linear.path}.weight"].float() - known[f"{linear.path}.weight"].float()
        if not change.isfinite().all():
            raise refuse(f"its {linear.path} has numbers that are not finite")
        if change.any():
            pairs[linear.path] = _factors(change, buffers.max_rank, linear.path, refuse)
    return HeadChange(pairs, {vector.path: _value(vector, head, shared) for vector in buffers.vectors})


def _check_alike(head: nn.Module, shared: nn.Module, refuse: Callable[[str], InvalidAdapter]) -> None:
    own, known = (_fields(each) for each in (head, shared))
    if type(head) is not type(shared):
        raise refuse(f"it must be a {type(shared).__name__}, as the shared head, got a {type(head).__name__}")
    for field in known:
        if own.get(field) != known[field]:
            raise refuse(f"its {field} must be {known[field]!r}, as in the shared head, got {own.get(field)!r}")


def _fields(head: nn.Module) -> dict[str, Any]:
    """The fields of the config, and the shapes of all tensors."""
    config = getattr(head, "config", None)
    fields = asdict(config) if is_dataclass(config) and not isinstance(config, type) else {}
    shapes = {key: list(value.shape) for key, value in head.state_dict().items()}
    return {key: value for key, value in fields.items() if key not in _LIMITS} | shapes


def _factors(change: torch.Tensor, most: int, path: str, refuse: Callable[[str], InvalidAdapter]) -> LoraPair:
    """``change`` ``[F, K]`` as a product of two matrices of rank ``most`` or less."""
    features, depth = change.shape
    if min(features, depth) <= most:
        one = torch.eye(min(features, depth))
        return LoraPair(one, change, 1.0) if depth <= features else LoraPair(change, one, 1.0)
    count = min(most + EXTRA, features, depth)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        left, values, right = torch.svd_lowrank(change.cpu(), q=count, niter=ITERATIONS)
    a, b = right[:, :most].t(), left[:, :most] * values[:most]
    if float((change.cpu() - b @ a).norm()) > TOLERANCE * float(change.norm()):
        reason = f"the difference of its {path} from the shared head has a rank above {most}"
        raise refuse(f"{reason}; wrap with a larger Adapters(head_rank=...), or head_rank={FULL!r}")
    return LoraPair(a, b, 1.0)


def _value(vector: AdaptedVector, head: nn.Module, shared: nn.Module) -> torch.Tensor:
    own = head.get_parameter(vector.path).detach()
    return own - shared.get_parameter(vector.path).detach() if vector.linear else own


def _linears(head: nn.Module, shared: set[int]) -> Iterator[AdaptedLinear]:
    numbers: dict[int, int] = {}
    of_head = {module.weight.data_ptr() for module in head.modules() if isinstance(module, nn.Embedding)}
    layers = len(head.get_submodule("layers")._modules)
    for path, module in head.named_modules():
        if not isinstance(module, nn.Linear) or module.weight.data_ptr() in shared | of_head:
            continue
        first, _, rest = path.partition(".")
        index, _, inner = rest.partition(".")
        # Linears outside of the layers are numbered as those of one more layer.
        layer, own = (int(index), inner) if first == "layers" else (layers, path)
        number = numbers[layer] = numbers.get(layer, -1) + 1
        features, depth = module.weight.shape
        yield AdaptedLinear(path, layer, own.replace(".", "_"), number, depth, features, SCOPE)


def _vectors(head: nn.Module, shared: set[int], linears: set[str]) -> Iterator[AdaptedVector]:
    for path, parameter in head.named_parameters():
        module, _, name = path.rpartition(".")
        if parameter.ndim != 1 or parameter.data_ptr() in shared:
            continue
        if not isinstance(head.get_submodule(module), nn.Linear):
            yield AdaptedVector(path, len(parameter))
        elif name == "bias" and module in linears:
            yield AdaptedVector(path, len(parameter), module)
