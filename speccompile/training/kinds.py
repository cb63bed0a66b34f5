"""Kinds of heads that can be trained, each in its own module."""

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

#: Initial weights that are not those of a head.
NEW = ("target", "random")


class HeadKind(ABC):
    """How a kind of head is trained. One is made for each training.

    Args:
        target: the target, in eval mode.
        options: of the training.

    Attributes:
        mode: the mode that drafts with such a head.
        given: the head that the training begins with, in float32; None for a new one.
    """

    mode: ClassVar[str]
    #: Whether a new head depends on the tokens ``always`` of :meth:`build`.
    keeps_tokens: ClassVar[bool] = True

    def __init__(self, target: PreTrainedModel, options: TrainOptions) -> None:
        self.target, self.options = target, options

    @property
    @abstractmethod
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose outputs the head reads.

        Raises:
            InvalidHead: the target has no such layers.
        """

    @cached_property
    @abstractmethod
    def given(self) -> nn.Module | None:
        """Loaded when it is asked for.

        Raises:
            InvalidHead, HeadKeys: it cannot be loaded, or not be trained.
            InvalidOption: an option would change what it has already.
        """

    @property
    @abstractmethod
    def given_form(self) -> str:
        """What the head that the training begins with is, beside its weights."""

    def depends_on(self, always: Collection[int]) -> dict[str, Any]:
        """By name, what the head to train depends on beside options, texts and target: a given one on its contents, a
        new one on the tokens ``always`` of :meth:`build`."""
        if self.given is None:
            return {"kept tokens": sorted(set(always)) if self.keeps_tokens else []}
        form = hashlib.sha256(self.given_form.encode()).hexdigest()[:16]
        return {"start's weights": weights_digest(self.given), "start's form": form}

    @abstractmethod
    def build(self, counts: torch.Tensor, always: Collection[int]) -> nn.Module:
        """A new head, in float32, on the target's device.

        Args:
            counts: int64 ``[V]``, how often each token is learnt.
            always: tokens that the draft vocabulary has in any case.

        Raises:
            InvalidHead: the target cannot have such a head; says why.
        """

    @abstractmethod
    def training(self, head: nn.Module, teacher: Teacher) -> nn.Module:
        """The module that is trained, called once: it holds ``head``, and its ``forward`` accepts a batch (see
        :class:`~speccompile.training.batches.Batches`) and returns ``loss`` and, in eval mode, ``counts``."""

    @torch.no_grad()
    def scale_outputs(self, weight: torch.Tensor, teacher: Teacher) -> None:
        """Put the factor that follows the target's lm_head (Cohere, Granite) into a ``weight`` of a head that begins as
        the target: nothing follows the head's logits."""
        if self.options.start == "target":
            weight.mul_(teacher.after.factor)

    @abstractmethod
    def save(self, head: nn.Module, folder: Path) -> None:
        """Write the head as a checkpoint that the kind's mode loads.

        Raises:
            OSError: the disk does not take it.
        """


def kind_of(target: PreTrainedModel, options: TrainOptions) -> HeadKind:
    """The kind that ``options`` name: class ``Training`` of the module of that name."""
    assert options.kind in KINDS
    found: type[HeadKind] = import_module(f"{__package__}.kind_{options.kind}").Training
    return found(target, options)
