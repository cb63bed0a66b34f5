"""A model of one shape and its speculator, which the parts of a group share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.gpu.budget import Figures, NotMeasured
from benchmarks.gpu.floor import copy_bandwidth
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.shapes import Shape, make_model
from speccompile import Speculator, wrap
from speccompile.policies.base import AnyPolicy


@dataclass(frozen=True)
class FromModel:
    """An argument of ``wrap`` that is made from the model."""

    make: Callable[[LlamaForCausalLM], Any]


class WrappedModel:
    """Both are built when a part first needs them.

    Args:
        dtype: of the weights; None is that of the settings.
        max_batch: slots of the speculator.
        backend: None is that of the settings.
        options: further arguments of ``wrap``.
    """

    def __init__(
        self,
        shape: Shape,
        settings: Settings,
        device: torch.device,
        *,
        dtype: torch.dtype | None = None,
        max_batch: int = 1,
        mode: str = "ngram",
        backend: str | None = None,
        **options: Any,
    ) -> None:
        self.shape, self.settings, self.device = shape, settings, device
        self._dtype = settings.dtype if dtype is None else dtype
        self.sizes = {"max_batch": max_batch, "max_len": settings.max_len, "backend": backend or settings.backend}
        self._mode, self._options = mode, options
        self._spec: Speculator | None = None
        #: What chooses draft lengths after a wrap, before a part has set a tier.
        self.policy: AnyPolicy | None = None

    @cached_property
    def model(self) -> LlamaForCausalLM:
        return make_model(self.shape, self.device, self._dtype, self.settings.max_len)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second that a copy reads and writes on the device."""
        return copy_bandwidth(self.device, self.settings.copied_bytes)

    @property
    def spec(self) -> Speculator:
        """Raises NotMeasured: the part that builds it did not run to its end."""
        if self._spec is None:
            raise NotMeasured("the wrap failed or did not run: see the part that wraps")
        return self._spec

    def wrap(self, figures: Figures) -> None:
        given = {name: of.make(self.model) if isinstance(of, FromModel) else of for name, of in self._options.items()}
        self._spec = wrap(self.model, self._mode, **self.sizes, **given)
        self.policy = self._spec.policy
        figures["backend"] = f"{self._spec.backend.name}: {self._spec.backend.reason}"
        figures["build_seconds"] = self._spec.build_seconds
        figures["arena_bytes"] = self._spec.arena.nbytes
