"""Measures which form of a linear is faster here, for the widths that will run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from speccompile.graph_capture.support import decoder_layers

# Weights that fit into a cache are no measure of reading them from memory, and are fast in either form.
SMALLEST_BYTES = 64 * 2**20
SAMPLE_BYTES = 128 * 2**20
REPEATS = 3
# The stock form stays unless the other is clearly faster, so that timing noise does not choose.
WORTHWHILE = 1.15
# Behind this a product is bound by arithmetic, which both forms do equally fast.
MOST_ROWS = 64


@dataclass(frozen=True)
class LinearChoice:
    """The form that linears take, and why."""

    weight_stationary: bool
    reason: str


STOCK = LinearChoice(False, "stock")


def choose_linears(model: PreTrainedModel, widths: Sequence[int]) -> LinearChoice:
    """Time both forms over a sample of the model's own weights.

    Args:
        widths: numbers of rows (B * T) that steps will have.
    """
    weights = [
        module.weight.detach()
        for module in decoder_layers(model)[1].modules()
        if isinstance(module, nn.Linear) and module.weight.device.type == "cpu"
    ]
    if not weights or weights[0].dtype != torch.float32:
        return LinearChoice(False, "stock (measured only for float32 on a CPU)")
    if sum(weight.nbytes for weight in weights) < SMALLEST_BYTES:
        return LinearChoice(False, "stock (the model is small)")
    sample, size = [], 0
    for weight in weights:
        if size < SAMPLE_BYTES:
            sample.append(weight)
            size += weight.nbytes
    gains = [_gain(sample, width) for width in widths if width <= MOST_ROWS] or [1.0]
    gain = sum(gains) / len(gains)
    if gain < WORTHWHILE:
        return LinearChoice(False, f"stock (the weight-stationary form measured {gain:.2f}x as fast)")
    return LinearChoice(True, f"weight-stationary (measured {gain:.2f}x as fast as stock)")


def _gain(weights: list[torch.Tensor], rows: int) -> float:
    inputs = {features: torch.randn(rows, features) for features in {weight.shape[1] for weight in weights}}
    # One column is a matrix-vector product, which no BLAS treats so: a step of one row runs with two.
    columns = {features: x if rows > 1 else x.repeat(2, 1) for features, x in inputs.items()}

    def stock() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    def weight_stationary() -> None:
        for weight in weights:
            torch.mm(weight, columns[weight.shape[1]].t())

    best = [float("inf"), float("inf")]
    with torch.no_grad():
        for _ in range(REPEATS):
            best = [min(known, _seconds(form)) for known, form in zip(best, (stock, weight_stationary), strict=True)]
    return best[0] / best[1]


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
