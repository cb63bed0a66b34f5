"""Embeddings of images by the model's own code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.errors import UnusableInputs, error_line
from speccompile.graph_capture.altering import altering
from speccompile.graph_capture.encoder_decoder import accepts
from speccompile.graph_capture.model_info import decoder_layers
from speccompile.graph_capture.rope_positions import PARTS
from speccompile.multimodal.features import PromptFeatures
from speccompile.multimodal.image_keys import ImagePlace, image_places
from speccompile.multimodal.model_inputs import ModelInputs, is_per_token
from speccompile.multimodal.recorded_forward import FirstLayerReached, RecordedForward
from speccompile.ops.cpu.free_originals import originals_freed
from speccompile.ops.cpu.quantized import is_quantized
from speccompile.utils.tracer_isolation import copy_over_same_tensors


class FeatureEncoder:
    """Embeds the images of prompts: it runs the forward of the model up to the first decoder layer, with the inputs
    beside the tokens, and keeps what that layer would read.

    The vision code, its merge with the text and its rotary positions are thus the model's own, in any family. The
    forward runs on a copy of the module tree over the same tensors, since hooks end it.

    Args:
        model: the wrapped model.
        inputs: what it accepts.
    """

    def __init__(self, model: PreTrainedModel, inputs: ModelInputs) -> None:
        self._model = model
        self._inputs = inputs
        # Copies that no thread uses now.
        self._idle: list[PreTrainedModel] = []

    @property
    def names(self) -> frozenset[str]:
        """The inputs that the model accepts beside tokens."""
        return self._inputs.names

    def encode(
        self, input_ids: torch.Tensor, kept: torch.Tensor, given: Mapping[str, Any]
    ) -> list[PromptFeatures | None]:
        """Embed the images of a batch of prompts.

        Args:
            input_ids: int64 ``[B, P]``.
            kept: bool ``[B, P]``, False at padding.
            given: inputs by the name of the forward's parameter. Tensors are moved to the model's device, and those of
                floating-point numbers get its dtype.

        Returns:
            The features of each row; None for a row without placeholder tokens.

        Raises:
            UnusableInputs: the inputs do not fit the placeholder tokens, or the model reads them in a way that chunks
                of a prompt do not support.
        """
        self._check_names(given)
        placeholders = torch.tensor(self._inputs.placeholders)
        embedded = torch.isin(input_ids.cpu(), placeholders) & kept.cpu()
        features = [name for name, value in given.items() if value is not None and not is_per_token(name)]
        if not features:
            return [None] * len(input_ids)
        if not embedded.any():
            reason = f"{', '.join(sorted(features))} is given, and no prompt has a token that stands for it"
            raise UnusableInputs(reason=f"{reason}; build the prompt with the model's processor")
        with self._copy() as model:
            read = self._run(model, input_ids, kept, given)
        images = image_places(given, embedded)
        return [
            self._features(read, row, kept[row].cpu(), embedded[row], None if images is None else images[row])
            if embedded[row].any()
            else None
            for row in range(len(input_ids))
        ]

    def _check_names(self, given: Mapping[str, Any]) -> None:
        if unknown := sorted(given.keys() - self.names):
            reason = f"the model's forward has no input {unknown[0]!r}; it has {', '.join(sorted(self.names))}"
            raise UnusableInputs(reason=reason)

    @contextlib.contextmanager
    def _copy(self) -> Iterator[PreTrainedModel]:
        """A copy of the module tree for this thread."""
        model = self._idle.pop() if self._idle else self._copied()
        if not _share_tensors(model, self._model):
            self._idle.clear()
            model = self._copied()
        yield model
        self._idle.append(model)

    def _copied(self) -> PreTrainedModel:
        model = copy_over_same_tensors(self._model)
        if model is self._model:
            raise UnusableInputs(reason="its module tree cannot be copied, and hooks would change the model")
        if originals_freed(self._model) or is_quantized(self._model):
            model.set_input_embeddings(_NoText(self._inputs))
        # A mask of this kind shows which tokens attend to which. No layer attends with it.
        text: Any = model.get_submodule(_text_path(model))
        text.config._attn_implementation = "sdpa"
        return model

    def _run(
        self, model: PreTrainedModel, input_ids: torch.Tensor, kept: torch.Tensor, given: Mapping[str, Any]
    ) -> RecordedForward:
        mask, inputs = kept.to(self._inputs.device), self._inputs
        arguments: dict[str, Any] = {name: _moved(value, inputs) for name, value in given.items() if value is not None}
        if not self._inputs.parts and accepts(model, "position_ids"):
            arguments["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
        arguments |= {"attention_mask": mask.long(), "use_cache": False}
        embedding, text = model.get_input_embeddings(), model.get_submodule(_text_path(model))
        read = RecordedForward()
        try:
            with altering(model), read.recording(embedding, text, decoder_layers(model)[1][0]), torch.no_grad():
                model(input_ids=input_ids.to(inputs.device), **arguments)
        except FirstLayerReached:
            return read
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise UnusableInputs(reason=f"the model's own code refuses them: {error_line(error)}") from error
        raise UnusableInputs(reason="the model's forward does not run its first decoder layer")

    def _features(
        self,
        read: RecordedForward,
        row: int,
        kept: torch.Tensor,
        embedded: torch.Tensor,
        images: Sequence[ImagePlace] | None,
    ) -> PromptFeatures:
        places = embedded[kept].nonzero()[:, 0]
        own = embedded.nonzero()[:, 0].to(read.hidden.device)
        read.check(row, kept, self._inputs)
        if left := read.left_out(row, own):
            reason = f"prompt token {int(places[left[0]])} stands for other input, which is missing"
            raise UnusableInputs(reason=reason)
        offsets, delta = None, 0
        if self._inputs.parts:
            length = int(kept.sum())
            offsets = torch.zeros((PARTS, length), dtype=torch.int64)
            # [B, P] of a text; else a fourth part before these is the place itself.
            if (positions := read.positions) is not None and positions.ndim > 2:
                offsets = positions[-PARTS:, row].cpu()[:, kept] - torch.arange(length)
                delta = int((offsets + torch.arange(length)).max()) + 1 - length
        return PromptFeatures(places, read.hidden[row, own].clone(), read.added(row, own), offsets, delta, images)


class _NoText(nn.Module):
    """Zeros in the place of the embedding of tokens, whose weight only exists in packed form. Only the places of
    placeholder tokens are kept."""

    def __init__(self, inputs: ModelInputs) -> None:
        super().__init__()
        self._inputs = inputs

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Zeros ``[B, P, M]`` for ids ``[B, P]``."""
        size = (*input_ids.shape, self._inputs.hidden_size)
        return torch.zeros(size, dtype=self._inputs.dtype, device=input_ids.device)


def _moved(value: Any, inputs: ModelInputs) -> Any:
    if isinstance(value, list | tuple):
        return [_moved(each, inputs) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(inputs.device, inputs.dtype if value.is_floating_point() else None)


def _text_path(model: PreTrainedModel) -> str:
    """The path of the text model, which has the decoder layers."""
    return decoder_layers(model)[0].rpartition(".")[0]


def _share_tensors(copied: nn.Module, model: nn.Module) -> bool:
    """Whether the copy has the model's tensors, except for the embedding of tokens."""
    own = dict(model.named_parameters())
    return all(own.get(name) is parameter for name, parameter in copied.named_parameters())
