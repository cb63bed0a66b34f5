"""A forward of a vision-language model up to its first decoder layer, and what that layer would read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from speccompile.errors import UnusableInputs
from speccompile.multimodal.model_inputs import ModelInputs
from speccompile.utils.transformers_version import CACHE_NAMES

#: Arguments of the text model that a step has, or that only concern the forward itself.
_KNOWN = frozenset({"input_ids", "inputs_embeds", "position_ids", "attention_mask", *CACHE_NAMES})
#: Arguments by which Qwen3-VL adds features after its first layers (DeepStack).
_MASK, _ADDED = "visual_pos_masks", "deepstack_visual_embeds"


class FirstLayerReached(Exception):
    """The forward reached its first decoder layer."""


@dataclass
class RecordedForward:
    """Arguments and results of modules in one forward.

    Args:
        arguments: of the text model.
        tokens: ``[B, P, M]``, the embeddings of all tokens as text.
        first: ``[B, P, M]``, what the first decoder layer reads.
        mask: its attention mask.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    tokens: torch.Tensor | None = None
    first: torch.Tensor | None = None
    mask: Any = None

    @contextlib.contextmanager
    def recording(self, embedding: nn.Module, text: nn.Module, layer: nn.Module) -> Iterator[None]:
        """Record a forward in this context, and end it at ``layer`` by :class:`FirstLayerReached`."""
        handles = [
            embedding.register_forward_hook(self._embed),
            text.register_forward_pre_hook(self._enter, with_kwargs=True),
            layer.register_forward_pre_hook(self._reach, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _embed(self, _module: nn.Module, _args: Any, result: torch.Tensor) -> None:
        self.tokens = result

    def _enter(self, _module: nn.Module, _args: Any, kwargs: Mapping[str, Any]) -> None:
        self.arguments = kwargs

    def _reach(self, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.first = args[0] if args else kwargs["hidden_states"]
        self.mask = kwargs.get("attention_mask")
        raise FirstLayerReached

    @property
    def hidden(self) -> torch.Tensor:
        """``[B, P, M]``, what the first layer reads."""
        assert self.first is not None
        return self.first

    @property
    def positions(self) -> torch.Tensor | None:
        """Positions of the tokens, ``[B, P]`` or ``[PARTS or more, B, P]``, or None."""
        return self.arguments.get("position_ids")

    def left_out(self, row: int, places: torch.Tensor) -> list[int]:
        """Indices of those of ``places`` ``[E]`` of ``row`` at which the first layer reads the token's own
        embedding."""
        if self.tokens is None or self.tokens.shape != self.hidden.shape:
            return []
        same = (self.tokens[row, places] == self.hidden[row, places]).all(-1)
        found: list[int] = same.nonzero()[:, 0].tolist()
        return found

    def added(self, row: int, places: torch.Tensor) -> torch.Tensor:
        """``[D, E, M]``, what is added at ``places`` ``[E]`` of ``row`` after the first layers."""
        layers = []
        for features in self.arguments.get(_ADDED) or ():
            whole = torch.zeros_like(self.hidden)
            whole[self.arguments[_MASK]] = features.to(whole)
            layers.append(whole[row, places])
        return torch.stack(layers) if layers else self.hidden.new_zeros((0, len(places), self.hidden.shape[-1]))

    def check(self, row: int, kept: torch.Tensor, inputs: ModelInputs) -> None:
        """Check that chunks of a prompt can compute what the text model would.

        Args:
            kept: bool ``[P]``, False at padding of ``row``.

        Raises:
            UnusableInputs: the model attends to other tokens than those before each, or reads something else.
        """
        others = [name for name, value in self.arguments.items() if name not in _KNOWN and _has_tensor(value)]
        supported = {_MASK, _ADDED} if inputs.layers else set()
        if unknown := sorted(set(others) - supported):
            raise UnusableInputs(reason=f"its text model also reads {unknown[0]}, which chunks of a prompt do not have")
        given = self.arguments.get("attention_mask")
        for mask in [self.mask, *(given.values() if isinstance(given, Mapping) else [given])]:
            if not isinstance(mask, torch.Tensor) or mask.ndim != 4:
                continue
            seen = _seen(mask[row, 0], kept.to(mask.device))
            if seen.triu(1).any():
                reason = "the model's tokens of an image attend to later ones, and chunks of a prompt attend causally"
                raise UnusableInputs(reason=reason)
            if (seen[:, :-1] & ~seen[:, 1:]).tril(-1).any():
                raise UnusableInputs(reason="the model's tokens do not attend to all tokens between others")


def _seen(mask: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The keys that each query attends to, without padding, by a mask ``[P, P]``: bool, or 0 where it attends."""
    seen = mask if mask.dtype == torch.bool else mask == 0
    return seen[kept][:, kept]


def _has_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)
