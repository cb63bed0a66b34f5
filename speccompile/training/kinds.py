"""Kinds of heads to train. Each is in its own module."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.hidden_states.target_id import weights_digest
from speccompile.training.teacher import Teacher
from speccompile.training.train_options import KINDS, TrainOptions

#: Initial weights that do not come from a head.
NEW = ("target", "random")


class HeadKind(ABC):
    """One training of a head of this kind.

    Args:
        target: the target, in eval mode.
        options: options of the training.

    Attributes:
        mode: mode that drafts with such a head.
        head_class: class of such a head.
        given: head that the training starts from, in float32; None for a new head.
    """

    mode: ClassVar[str]
    head_class: ClassVar[type[nn.Module]]
    #: Whether a new head depends on the tokens ``always`` of :meth:`build`.
    keeps_tokens: ClassVar[bool] = True

    def __init__(self, target: PreTrainedModel, options: TrainOptions) -> None:
        self.target, self.options = target, options

    @property
    @abstractmethod
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose outputs the head reads.

        Raises:
            InvalidHead: the target does not have such layers.
        """

    @cached_property
    @abstractmethod
    def given(self) -> nn.Module | None:
        """Initial head, loaded at first access.

        Raises:
            InvalidHead, HeadKeys: it cannot be loaded or trained.
            InvalidOption: an option conflicts with the head.
        """

    @property
    @abstractmethod
    def given_form(self) -> str:
        """Description of the initial head, apart from its weights."""

    def depends_on(self, always: Collection[int]) -> dict[str, Any]:
        """Further inputs of the training, by name, after options, texts and target: the contents of an initial head,
        or for a new head the tokens ``always`` of :meth:`build`."""
        if self.given is None:
            return {"kept tokens": sorted(set(always)) if self.keeps_tokens else []}
        form = hashlib.sha256(self.given_form.encode()).hexdigest()[:16]
        return {"start's weights": weights_digest(self.given), "start's form": form}

    @abstractmethod
    def build(self, counts: torch.Tensor, always: Collection[int]) -> nn.Module:
        """Create a new head, in float32, on the target's device.

        Args:
            counts: int64 ``[V]``, number of occurrences of each token to learn.
            always: tokens that the draft vocabulary always includes.

        Raises:
            InvalidHead: such a head is not possible for the target. The error has the reason.
        """

    @abstractmethod
    def training(self, head: nn.Module, teacher: Teacher) -> nn.Module:
        """Create the module to train. It holds ``head``. Its ``forward`` accepts a batch (see
        :class:`~speccompile.training.batches.Batches`) and returns ``loss`` and, in eval mode, ``counts``. Called
        once."""

    @abstractmethod
    def trainable_copy(self, head: nn.Module) -> nn.Module:
        """Copy a head that drafts, in float32. What it shares with the target is not copied."""

    @torch.no_grad()
    def scale_outputs(self, weight: torch.Tensor, teacher: Teacher) -> None:
        """Multiply ``weight``, copied from the target's lm_head, by the factor that follows the lm_head (Cohere,
        Granite): the head has no such factor."""
        if self.options.start == "target":
            weight.mul_(teacher.after.factor)

    @abstractmethod
    def save(self, head: nn.Module, folder: Path) -> None:
        """Write the head as a checkpoint for the kind's mode.

        Raises:
            OSError: the checkpoint cannot be written.
        """


def kind_of(target: PreTrainedModel, options: TrainOptions) -> HeadKind:
    """Create the kind that ``options`` name: ``KIND`` of the module of that name."""
    return _kind(options.kind)(target, options)


def kind_of_head(head: nn.Module) -> str:
    """Name of the kind of a head that drafts."""
    return next(name for name in KINDS if isinstance(head, _kind(name).head_class))


def _kind(name: str) -> type[HeadKind]:
    assert name in KINDS
    found: type[HeadKind] = import_module(f"{__package__}.kind_{name}").KIND
    return found
