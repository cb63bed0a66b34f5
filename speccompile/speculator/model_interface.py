"""What code that holds a transformers model reads of it and calls, for a wrapped one.

``transformers.pipeline``, lm-eval's ``HFLM`` and scripts use a model by its attributes, and do not ask for its class.
Each member here is the wrapped model's own. What would change that model under its compiled steps is absent, or an
error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig

from speccompile.errors import CannotMove
from speccompile.ops.cpu.rounded import as_packed
from speccompile.speculator.base import SpeculatorBase
from speccompile.utils.torch_private import parse_to


class ModelInterface(SpeculatorBase):
    """The wrapped model's attributes and its forward."""

    @property
    def config(self) -> PreTrainedConfig:
        """The config of the model that is wrapped."""
        return self._open()[1].model.config

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's own: changes hold from the next request on."""
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
        """The name of the first argument of the model's forward, as transformers has it."""
        return self._open()[1].model.main_input_name

    @property
    def input_modalities(self) -> tuple[str, ...]:
        """Steps embed token ids alone, also those of a model that sees images."""
        return ("text",)

    @property
    def output_modalities(self) -> tuple[str, ...]:
        """What is generated: text."""
        return ("text",)

    def can_generate(self) -> bool:
        """Always True: ``generate`` is there."""
        return True

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the model that is wrapped."""
        return self._open()[1].model.parameters()

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """The number of its parameters, as transformers counts them."""
        model = self._open()[1].model
        return int(model.num_parameters(only_trainable=only_trainable, exclude_embeddings=exclude_embeddings))

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """The model's own forward, in PyTorch, with its arguments and its output.

        ``logits`` ``[B, T, V]`` are those that the steps verify with. After ``wrap(weights="int8")`` it computes with
        the rounded weights, as they do. It does not use the arena: the cache is the caller's.
        """
        target = self._open()[1]
        self._refuse_sharded("the model's forward", "call the sharded model on all ranks")
        target.state_of_weights()
        with as_packed(target.packs):
            return target.model(*inputs, **options)

    forward = __call__

    def eval(self) -> Self:
        """Return itself, with the model in evaluation mode."""
        self._open()[1].model.eval()
        return self

    def tie_weights(self) -> None:
        """Nothing: they were tied, or not, when the model was wrapped."""
        self._open()

    def to(self, *args: Any, **options: Any) -> Self:
        """Accepts what ``torch.nn.Module.to`` accepts, and changes nothing.

        Raises:
            CannotMove: the device or the dtype is another one.
        """
        device, dtype, *_ = parse_to(*args, **options)
        here = self.device
        moved = device is not None and (device.type != here.type or device.index not in (None, here.index))
        if moved or dtype not in (None, self.dtype):
            wanted = " and ".join(str(value) for value in (device, dtype) if value is not None)
            raise CannotMove(wanted=wanted, device=here, dtype=self.dtype)
        return self
