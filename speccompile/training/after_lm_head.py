"""Function that a target applies to the output of its lm_head: a factor, a soft cap, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

#: Keys of a config for a factor. Granite divides by its ``logits_scaling``, HyperCLOVA X multiplies by it.
FACTORS = ("logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier")
#: Keys for a cap, of Gemma 2 and of RecurrentGemma.
CAPS = ("final_logit_softcapping", "logits_soft_cap")


@dataclass(frozen=True)
class AfterLmHead:
    """An increasing function of each logit: multiply by ``factor``, then limit smoothly to ``cap``."""

    factor: float = 1.0
    cap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.cap is not None:
            logits = (logits / self.cap).tanh() * self.cap
        return logits


def possible(config: PretrainedConfig) -> Iterator[AfterLmHead]:
    """Functions that a target of this config may have, the identity first."""
    factors, caps = [1.0], [None, *_numbers(config, CAPS)]
    for value in _numbers(config, FACTORS):
        factors += [value, 1 / value]
    for cap in caps:
        for factor in factors:
            yield AfterLmHead(factor, cap)


def _numbers(config: PretrainedConfig, names: tuple[str, ...]) -> list[float]:
    """Values of ``names`` that are greater than 0."""
    given = (getattr(config, name, None) for name in names)
    return [float(value) for value in given if isinstance(value, int | float) and value > 0]
