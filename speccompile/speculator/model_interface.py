"""The attributes and methods of a transformers model that other code uses, for a wrapped model.

``transformers.pipeline``, lm-eval's ``HFLM`` and scripts use a model by its attributes, and do not check its class.
Each member here is the wrapped model's own. Members that would change the model under its compiled steps are absent, or
raise an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig

from speccompile.errors import CannotMove
from speccompile.graph_capture.packed_forward import as_packed
from speccompile.graph_capture.rounded_kv import rounding_kv
from speccompile.speculator.base import SpeculatorBase
from speccompile.utils.torch_private import parse_to


class ModelInterface(SpeculatorBase):
    """The wrapped model's attributes and its forward."""

    @property
    def config(self) -> PreTrainedConfig:
        """The config of the wrapped model."""
        return self._open()[1].model.config

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's own generation_config. Changes apply from the next request on."""
        return self._open()[1].model.generation_config

    @generation_config.setter
    def generation_config(self, config: GenerationConfig) -> None:
        self._open()[1].model.generation_config = config

    @property
    def device(self) -> torch.device:
        """The device of the model's weights."""
        return self._open()[1].model.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's weights."""
        return self._open()[1].model.dtype

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self._open()[1].model.training

    @property
    def name_or_path(self) -> str | None:
        """The folder or hub id that the model was loaded from."""
        return self._open()[1].model.name_or_path

    @property
    def main_input_name(self) -> str:
        """The name of the first argument of the model's forward, by transformers' name."""
        return self._open()[1].model.main_input_name

    @property
    def input_modalities(self) -> tuple[str, ...]:
        """Input modalities: those of a vision-language model are the model's; others only have text."""
        target = self._open()[1]
        return ("text",) if target.encoder is None else tuple(target.model.input_modalities)

    @property
    def output_modalities(self) -> tuple[str, ...]:
        """Output modalities, only text."""
        return ("text",)

    def get_encoder(self) -> nn.Module:
        """The encoder of an encoder-decoder, for pipelines."""
        encoder: nn.Module = self._open()[1].model.get_encoder()
        return encoder

    def can_generate(self) -> bool:
        """Return True: ``generate`` exists."""
        return True

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the wrapped model."""
        return self._open()[1].model.parameters()

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """The number of the model's parameters, as transformers counts them."""
        model = self._open()[1].model
        return int(model.num_parameters(only_trainable=only_trainable, exclude_embeddings=exclude_embeddings))

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Run the model's own forward, in PyTorch, with its arguments and its output.

        ``logits`` ``[B, T, V]`` are those that the steps verify with. After ``wrap(weights="int8")`` the forward
        computes with the rounded weights, as the steps do. After ``wrap(kv="float16")`` it has a cache, also for
        ``use_cache=False``, since that rounds keys and values. It does not use the arena: the caller owns the cache.
        """
        target = self._open()[1]
        self._refuse_sharded("the model's forward", "call the sharded model on all ranks")
        target.state_of_weights()
        if target.kv is not None:
            options["use_cache"] = True
        with as_packed(target.model, target.packs), rounding_kv(target.kv):
            return target.model(*inputs, **options)

    forward = __call__

    def eval(self) -> Self:
        """Put the model into evaluation mode, and return the speculator."""
        self._open()[1].model.eval()
        return self

    def tie_weights(self) -> None:
        """Do nothing: weights were tied, or not, when the model was wrapped."""
        self._open()

    def to(self, *args: Any, **options: Any) -> Self:
        """Accept the arguments of ``torch.nn.Module.to``, and change nothing.

        Raises:
            CannotMove: the device or the dtype differs from the model's.
        """
        device, dtype, *_ = parse_to(*args, **options)
        here = self.device
        moved = device is not None and (device.type != here.type or device.index not in (None, here.index))
        if moved or dtype not in (None, self.dtype):
            wanted = " and ".join(str(value) for value in (device, dtype) if value is not None)
            raise CannotMove(wanted=wanted, device=here, dtype=self.dtype)
        return self
