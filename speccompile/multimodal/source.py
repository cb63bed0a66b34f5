"""The output of an encoder-decoder's encoder for a request, by the model's own code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from speccompile.errors import UnusableInputs, error_line
from speccompile.graph.arena import Arena
from speccompile.graph_capture.encoder_decoder import EncoderOutput
from speccompile.graph_capture.fill_cross import fill_cross

#: Main inputs of encoders, by the names that their forwards have.
_MAIN = ("input_features", "input_values", "input_ids")
#: Their dimensions, with that of rows.
_DIMS = {"input_features": 3, "input_values": 2, "input_ids": 2}
_OUTPUTS, _MASK = "encoder_outputs", "attention_mask"


@dataclass(frozen=True)
class SourceFeatures:
    """The output of the encoder for one request.

    Args:
        states: ``[P, M]``, without padding.
        fill: writes what the decoder's layers attend to in them into the state of a slot.
    """

    states: torch.Tensor
    fill: Callable[[Arena, int, torch.Tensor], None] = field(repr=False)

    in_chunks: ClassVar[bool] = False
    decodes_last: ClassVar[bool] = True

    def identities(self, prompt: Sequence[int]) -> list[int]:
        """A number for each token of ``prompt``: a negative hash of it and of the encoder's output, then its id.
        Prompts with equal numbers have equal KV."""
        values = self.states.contiguous().cpu().view(torch.uint8)
        digest = blake2b(values.numpy().tobytes(), digest_size=8)
        digest.update(prompt[0].to_bytes(8))
        return [-1 - int.from_bytes(digest.digest()), *prompt[1:]]

    def place(self, arena: Arena, slot: int) -> None:
        """Write the state of ``slot`` that no step changes."""
        self.fill(arena, slot, self.states)


class SourceEncoder:
    """Runs the encoder of a wrapped encoder-decoder.

    Args:
        model: the wrapped model.
        positions: the positions that an encoder's output has at most.
    """

    def __init__(self, model: PreTrainedModel, positions: int) -> None:
        self._model, self._positions = model, positions
        self._parameters = inspect.signature(model.get_encoder().forward).parameters.keys()
        #: The name of the encoder's main input.
        self.main = next(name for name in _MAIN if name in self._parameters)

    @property
    def names(self) -> frozenset[str]:
        """The inputs of a request beside the tokens of its decoder."""
        return frozenset({self.main, _MASK, _OUTPUTS})

    def encode(
        self, input_ids: torch.Tensor, kept: torch.Tensor, given: Mapping[str, Any]
    ) -> list[SourceFeatures | None]:
        """Run the encoder for a batch of requests.

        Args:
            input_ids: int64 ``[B, P]``, the prompts of the decoder.
            kept: not read.
            given: the encoder's main input, ``[B, ...]``, and ``attention_mask`` ``[B, P]`` with 0 at padding; or
                ``encoder_outputs``.

        Returns:
            The encoder's output for each row.

        Raises:
            UnusableInputs: the main input is missing, has another number of rows, or does not fit the encoder.
        """
        known = {name: value for name, value in given.items() if value is not None}
        if unknown := sorted(known.keys() - self.names):
            raise UnusableInputs(
                reason=f"the model has no input {unknown[0]!r}; it has {', '.join(sorted(self.names))}"
            )
        self.check(known)
        states, mask = self._run(known)
        rows = len(input_ids)
        if states.ndim != 3 or len(states) != rows or mask.shape != states.shape[:2]:
            reason = f"the encoder's output has the shape {list(states.shape)} and the mask {list(mask.shape)}"
            raise UnusableInputs(reason=f"{reason} for {rows} prompts of the decoder")
        fill, found = partial(_fill, self._model), list[SourceFeatures | None]()
        for row, of_row in zip(states, mask, strict=True):
            count = int(of_row.sum())
            if not 0 < count <= self._positions:
                reason = f"the encoder's output has {count} positions; 1 to {self._positions} are supported"
                raise UnusableInputs(reason=reason)
            found.append(SourceFeatures(row[of_row].clone(), fill))
        return found

    def check(self, given: Mapping[str, Any]) -> None:
        """Check the encoder's main input among ``given``.

        Raises:
            UnusableInputs: it is missing, or is not a tensor of the kind that the encoder reads.
        """
        main, mask, reads_text = given.get(self.main), given.get(_MASK), self.main == "input_ids"
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2):
            found = f"{list(mask.shape)}" if isinstance(mask, torch.Tensor) else f"a {type(mask).__name__}"
            raise UnusableInputs(reason=f"{_MASK} is {found}; give a tensor [rows, positions], 0 at padding")
        if main is None and given.get(_OUTPUTS) is None:
            name = type(self._model).__name__
            raise UnusableInputs(reason=f"{name} decodes what its encoder read, and {self.main} is missing")
        dims = _DIMS[self.main]
        if main is None:
            return
        if not isinstance(main, torch.Tensor):
            raise UnusableInputs(reason=f"{self.main} is a {type(main).__name__}, not a tensor")
        if main.is_floating_point() == reads_text or main.ndim != dims:
            wanted = f"{'integers' if reads_text else 'floating-point numbers'} of {dims} dimensions"
            raise UnusableInputs(reason=f"{self.main} is {main.dtype} {list(main.shape)}; the encoder reads {wanted}")

        bins = getattr(self._model.config, "num_mel_bins", None)
        if self.main == "input_features" and bins is not None and bins not in main.shape[1:]:
            raise UnusableInputs(reason=f"{self.main} is {list(main.shape)}; the encoder reads {bins} mel bins")

    def encode_one(self, prompt: list[int], given: Mapping[str, Any] | SourceFeatures | None) -> SourceFeatures | None:
        """Run the encoder for one request, or return the given result. Inputs may be without the dimension of rows.

        Raises:
            UnusableInputs: as :meth:`encode`.
        """
        if isinstance(given, SourceFeatures):
            return given
        if not (given is None or isinstance(given, Mapping)):
            reason = f"inputs is a {type(given).__name__}; give a mapping with {self.main}"
            raise UnusableInputs(reason=reason)
        inputs = dict(given or {})
        for name, dims in ((self.main, _DIMS[self.main]), (_MASK, 2)):
            value = inputs.get(name)
            if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
                value = torch.tensor(value)
            if isinstance(value, torch.Tensor):
                inputs[name] = value[None] if value.ndim == dims - 1 else value
        ids = torch.tensor([prompt])
        return self.encode(ids, torch.ones_like(ids, dtype=torch.bool), inputs)[0]

    def _run(self, given: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """The encoder's output ``[B, P, M]``, and bool ``[B, P]``, False at padding."""
        main, model, mask = given.get(self.main), self._model, given.get(_MASK)
        if _OUTPUTS in given:
            states = self._checked_outputs(given[_OUTPUTS])
        else:
            assert main is not None
            inputs = {self.main: main.to(model.device, model.dtype if main.is_floating_point() else None)}
            if mask is not None and _MASK in self._parameters:
                inputs[_MASK] = mask.to(model.device)
            try:
                with torch.no_grad():
                    states = model.get_encoder()(**inputs).last_hidden_state
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                raise UnusableInputs(reason=f"the model's own code refuses them: {error_line(error)}") from error
        if self.main != "input_ids" or mask is None:
            # Decoders over audio attend to all positions.
            return states, torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        return states, mask.bool().to(states.device)

    def _checked_outputs(self, outputs: Any) -> torch.Tensor:
        """The states ``[B, P, M]`` of given outputs of the encoder, in the model's dtype."""
        states = outputs[0] if isinstance(outputs, tuple | ModelOutput) and len(outputs) else outputs
        size = self._model.config.hidden_size
        if not isinstance(states, torch.Tensor) or not states.is_floating_point() or states.shape[2:] != (size,):
            found = (
                f"{states.dtype} {list(states.shape)}" if isinstance(states, torch.Tensor) else type(outputs).__name__
            )
            reason = f"{_OUTPUTS} is {found}; give the output of the model's encoder, numbers [rows, positions, {size}]"
            raise UnusableInputs(reason=reason)
        return states.to(self._model.device, self._model.dtype)


def _fill(model: PreTrainedModel, arena: Arena, slot: int, states: torch.Tensor) -> None:
    length = torch.tensor([len(states)], device=states.device)
    fill_cross(model, arena, slot, EncoderOutput(states[None].to(model.device), length))
