"""Quantised weights of checkpoints: integers in groups, as their format stores them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch

from speccompile.errors import InvalidOption
from speccompile.utils.devices import traits_of
from speccompile.utils.weight_forms import Forms, QuantizedForms, read_weights

#: Numbers of inputs that can share a scale. One group of all inputs (one scale for an output) is also possible.
GROUPS = (16, 32, 64, 128)
#: Ranges of values by ``bits``. Values of four bits are signed or unsigned.
RANGES = {4: (-8, 15), 6: (-32, 31), 8: (-128, 127)}


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """The weight ``[N, K]`` of a linear or an embedding: ``w[n, order[k]] = scales[n, k // group] * values[n, k] -
    minimums[n, k // group]``, computed in float32.

    Args:
        values: int8 ``[N, K]``, the integers that the format stores. Values of four bits are all in -8 to 7, or all in
            0 to 15; values of six bits in -32 to 31; values of eight bits in -128 to 127.
        bits: 4, 6 or 8.
        scales: float32 ``[N, G]``, finite, ``G = K / group``.
        minimums: float32 ``[N, G]``, finite, subtracted from the products; None if the format has no minimums.
        group: 16, 32, 64 or 128 inputs, or K. It divides K.
        order: int64 ``[K]``, a permutation: column k of ``values`` is multiplied with input ``order[k]`` (GPTQ's
            act-order). None means that column k is multiplied with input k.
        experts: how many matrices these are, one after another: the weight is ``[E, N / E, K]``. None: it is one.

    Raises:
        InvalidOption: a tensor has another shape, dtype or device (CPU), or values out of range.
    """

    values: torch.Tensor
    bits: int
    scales: torch.Tensor
    minimums: torch.Tensor | None
    group: int
    order: torch.Tensor | None = None
    experts: int | None = None

    def __post_init__(self) -> None:
        def require(holds: bool, name: str, reason: str) -> None:
            if not holds:
                raise InvalidOption(where="GroupedWeight", name=name, value=getattr(self, name), reason=reason)

        values = self.values
        require(_is(values, torch.int8, 2) and values.numel() > 0, "values", "it must be int8 [N, K] on the CPU")
        require(self.bits in RANGES, "bits", f"choose from {', '.join(map(str, RANGES))}")
        outputs, inputs = values.shape
        fits = self.group in (*GROUPS, inputs) and inputs % self.group == 0
        require(fits, "group", f"K is {inputs}; choose a divisor from {', '.join(map(str, GROUPS))}, or K")
        wanted = (outputs, inputs // self.group)
        for name in ("scales", "minimums"):
            tensor: torch.Tensor | None = getattr(self, name)
            if tensor is not None or name == "scales":
                reason = f"it must be float32 {list(wanted)} on the CPU, and finite"
                fits = _is(tensor, torch.float32, 2) and tensor is not None and tuple(tensor.shape) == wanted
                require(fits and bool(tensor is not None and tensor.isfinite().all()), name, reason)
        low, high = (int(end) for end in torch.aminmax(values))
        least, most = RANGES[self.bits]
        require(least <= low and high <= most, "values", f"values of {self.bits} bits must be {least} to {most}")
        if self.bits == 4:
            require(low >= 0 or high < 8, "values", "values of 4 bits must all be -8 to 7, or all 0 to 15")
        if self.experts is not None:
            divides = self.experts > 0 and outputs % self.experts == 0
            require(divides, "experts", f"it must divide the number of outputs, {outputs}")
        if self.order is not None:
            is_permutation = _is(self.order, torch.int64, 1) and torch.equal(
                self.order.sort().values, torch.arange(inputs)
            )
            require(is_permutation, "order", f"it must be an int64 permutation of 0 to {inputs - 1} on the CPU")

    @property
    def shape(self) -> tuple[int, ...]:
        """``(N, K)``, or ``(E, N / E, K)`` of experts."""
        outputs, inputs = self.values.shape
        return (outputs, inputs) if self.experts is None else (self.experts, outputs // self.experts, inputs)

    @property
    def nbytes(self) -> int:
        """Bytes of these tensors; a value of four or six bits needs a byte here."""
        tensors = (self.values, self.scales, self.minimums, self.order)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def dequantize(self) -> torch.Tensor:
        """Return the weight in float32, of shape :attr:`shape`: the bits that the format's library computes in
        float32."""
        groups = self.values.unflatten(1, (-1, self.group)) * self.scales[..., None]
        if self.minimums is not None:
            groups = groups - self.minimums[..., None]
        weight = groups.flatten(1)
        ordered = weight if self.order is None else weight[:, self.order.argsort()]
        return ordered.view(self.shape)


class QuantizedWeights(QuantizedForms, Mapping[str, GroupedWeight]):
    """Quantised weights by the names of the Hugging Face model's parameters, for ``wrap(weights=...)``.

    Args:
        weights: weights by name, ``"model.layers.0.self_attn.q_proj.weight"``. The mapping may read a weight from a
            file at each lookup: ``wrap`` looks each one up once.
        format: name of the format, for ``explain()``: ``"GGUF Q4_K"``.
        others: the form of the model's other weights, as ``wrap(weights=...)`` accepts it: ``"int8"``,
            ``{"lm_head": "int8"}``.

    Raises:
        InvalidOption: ``format`` is empty, there are no weights, or ``others`` is not a valid form.
    """

    def __init__(self, weights: Mapping[str, GroupedWeight], format: str, others: Forms = "same") -> None:
        where = "QuantizedWeights"
        if not isinstance(format, str) or not format:
            raise InvalidOption(where=where, name="format", value=format, reason="name the format: 'GGUF Q4_K'")
        if not isinstance(weights, Mapping) or not weights:
            reason = "give a mapping of parameter names to GroupedWeight, with at least one entry"
            raise InvalidOption(where=where, name="weights", value=weights, reason=reason)
        if isinstance(others, QuantizedForms):
            reason = "it must be a form of weights that are not quantised"
            raise InvalidOption(where=where, name="others", value=others, reason=reason)
        self._weights = weights
        self.format = format
        self.others = cast(Forms, read_weights(where, "others", others))

    def __getitem__(self, name: str) -> GroupedWeight:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __repr__(self) -> str:
        return f"<{len(self)} quantised weights, {self.format}>"


def _is(tensor: torch.Tensor | None, dtype: torch.dtype, dimensions: int) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and (tensor.dtype, tensor.dim()) == (dtype, dimensions)
        and traits_of(tensor.device).host_memory
    )
