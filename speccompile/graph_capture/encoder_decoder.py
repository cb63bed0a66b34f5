"""Encoder-decoders: the decoder is the target model, over the output of an encoder that has run before."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

#: Fields of a config with the number of positions that an encoder's output has at most.
_POSITIONS = ("max_source_positions", "max_position_embeddings", "n_positions")
#: Positions of encoders whose config has no such field (relative positions).
DEFAULT_POSITIONS = 512

#: Arguments of the decoder by the name that a causal LM's forward has for them.
_OF_DECODER = {name: f"decoder_{name}" for name in ("input_ids", "position_ids", "attention_mask")}


@dataclass(frozen=True)
class EncoderOutput:
    """The result of an encoder for the inputs of B rows.

    Args:
        states: ``[B, P, M]``, its output.
        lengths: int64 ``[B]``, the number of each row's positions. Those after them are padding.
    """

    states: torch.Tensor
    lengths: torch.Tensor

    @property
    def mask(self) -> torch.Tensor:
        """int64 ``[B, P]``, 0 at padding."""
        places = torch.arange(self.states.shape[1], device=self.states.device)
        return (places < self.lengths[:, None]).long()

    def row(self, index: int) -> EncoderOutput:
        """Only the row ``index``, without padding."""
        length = int(self.lengths[index])
        return EncoderOutput(self.states[index : index + 1, :length], self.lengths[index : index + 1])


def source_positions(model: PreTrainedModel) -> int | None:
    """The positions that the output of the model's encoder has at most; None for a decoder-only model."""
    if not model.config.is_encoder_decoder:
        return None
    found = (getattr(model.config, name, None) for name in _POSITIONS)
    return next((size for size in found if isinstance(size, int)), DEFAULT_POSITIONS)


def random_source(model: PreTrainedModel, positions: int, rows: int) -> EncoderOutput:
    """Random states ``[rows, positions, M]`` in the place of an encoder's output. Each row has half the positions of
    the row before it."""
    size = model.get_encoder().config.hidden_size
    generator = torch.Generator().manual_seed(1)
    states = torch.randn((rows, positions, size), generator=generator)
    lengths = torch.tensor([max(1, positions >> row) for row in range(rows)])
    return EncoderOutput(states.to(model.device, model.dtype), lengths.to(model.device))


def decoder_argument(model: PreTrainedModel, name: str) -> str:
    """The name that the model's forward has for an argument of its decoder."""
    return _OF_DECODER.get(name, name) if model.config.is_encoder_decoder else name


def accepts(model: PreTrainedModel, name: str) -> bool:
    """Whether the model's decoder has an argument of that name."""
    return decoder_argument(model, name) in inspect.signature(model.forward).parameters


def decode(model: PreTrainedModel, source: EncoderOutput | None, **arguments: Any) -> Any:
    """Run the forward of ``model`` as that of a causal LM.

    Args:
        source: the encoder's output; None for a decoder-only model.
        arguments: those of a causal LM's forward.
    """
    if source is None:
        return model(**arguments)
    given = {decoder_argument(model, name): value for name, value in arguments.items()}
    return model(**given, encoder_outputs=BaseModelOutput(last_hidden_state=source.states), attention_mask=source.mask)
