"""Options of ``train_head``. This module does not import torch, so the command line can show and check them first.

``python -m speccompile.training.train_options`` prints the table of docs/reference/options.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from speccompile.errors import InvalidOption
from speccompile.training.text_options import Number
from speccompile.utils.numbers import is_int, python_numbers
from speccompile.utils.options import OneOf, Options, WholeNumber, flag, option

#: Kinds of heads, each in its own module; see :mod:`speccompile.training.kinds`.
KINDS = ("eagle3", "mtp", "block")
#: Options that only some kinds have, and these kinds.
OF_KINDS = {
    "unroll": ("eagle3", "mtp"),
    "draft_vocab": ("eagle3", "block"),
    "layers": ("eagle3", "block"),
    "block_size": ("block",),
    "blocks": ("block",),
    "head_layers": ("block",),
    "markov_rank": ("block",),
    "sample_from_anchor": ("block",),
    "weights": ("block",),
    "variation": ("block",),
    "layout": ("eagle3",),
}


def _layers(where: str, name: str, value: Any) -> tuple[int, ...] | None:
    """Check ascending layers. Raises InvalidOption."""
    given = python_numbers(value)
    if given is None:
        return None
    whole = isinstance(given, list | tuple) and all(is_int(x) for x in given)
    if not whole or not given or min(given) < 0 or list(given) != sorted(set(given)):
        raise InvalidOption(where=where, name=name, value=value, reason="give ascending layers, such as (1, 14, 26)")
    return tuple(given)


def _minutes(where: str, name: str, value: Any) -> float | None:
    """Check minutes, or None. Raises InvalidOption."""
    return None if python_numbers(value) is None else Number(0)(where, name, value)


def _start(where: str, name: str, value: Any) -> str:
    """Check initial weights. Raises InvalidOption."""
    if not isinstance(value, str | Path) or not str(value):
        reason = "give target, random, or a head: a folder or a hub id"
        raise InvalidOption(where=where, name=name, value=value, reason=reason)
    return str(value)


@dataclass(frozen=True)
class TrainOptions(Options):
    """Options of :func:`speccompile.training.train_head`.

    Raises:
        InvalidOption: a value is not valid.
    """

    where: ClassVar[str] = "train_head"
    #: Options that a later call may change. They do not affect the training, except that hidden states on the disk are
    #: rounded to bfloat16.
    free: ClassVar[tuple[str, ...]] = ("minutes", "states", "layout")

    kind: str = field(default="eagle3", metadata=option("What is trained.", OneOf(KINDS)))
    epochs: int = field(default=3, metadata=option("How often each text is trained on.", WholeNumber(1)))
    learning_rate: float = field(
        default=1e-3,
        metadata=option("AdamW's at its peak: it rises during `warmup`, then falls as a cosine.", Number(0)),
    )
    warmup: float = field(
        default=0.03, metadata=option("Share of the steps in which `learning_rate` rises.", Number(0, 1))
    )
    batch_tokens: int = field(
        default=2048, metadata=option("Tokens of a step, padding included, on each device.", WholeNumber(8))
    )
    max_len: int = field(default=2048, metadata=option("Most tokens of a text; the rest is left out.", WholeNumber(8)))
    unroll: int = field(
        default=5,
        metadata=option("Draft steps that are trained in a row, each on the head's own outputs.", WholeNumber(1)),
    )
    decay: float = field(
        default=0.8, metadata=option("Weight of a draft token's loss relative to the one before.", Number(0, 1))
    )
    draft_vocab: int | None = field(
        default=None,
        metadata=option(
            "Most frequent tokens, which the head can draft. By default 8192 of a vocabulary over 16384 for an EAGLE-3 "
            "head, and all tokens for a block drafter, which then has the target's lm_head.",
            WholeNumber(2, or_none=True),
        ),
    )
    layers: Sequence[int] | None = field(
        default=None,
        metadata=option(
            "The target's layers whose outputs the head reads; by default EAGLE-3's three, or DFlash's five.", _layers
        ),
    )
    start: str = field(
        default="target",
        metadata=option(
            "Initial weights: what the target's last layer has of the same shape (`target`), `random` ones, or those "
            "of a head (a folder or a hub id), whose sizes, layers and draft vocabulary stay.",
            _start,
        ),
    )
    learn_from: str = field(
        default="answers", metadata=option("Tokens to learn from: the answers, or all.", OneOf(("answers", "all")))
    )
    held_out: float = field(
        default=0.02,
        metadata=option(
            "Share of the texts that are kept apart: the head is judged on them and not trained on them.",
            Number(0, 0.5),
        ),
    )
    eval_every: int = field(
        default=100,
        metadata=option("Steps after which the head is judged and a checkpoint is written.", WholeNumber(1)),
    )
    precision: str = field(
        default="auto",
        metadata=option(
            "Precision of forwards, the target's included: auto is bfloat16 on GPUs. Trained weights are float32.",
            OneOf(("auto", "float32", "bfloat16")),
        ),
    )
    seed: int = field(default=0, metadata=option("Seed of initial weights and of the order of texts.", WholeNumber(0)))
    states: bool = field(
        default=True,
        metadata=option(
            "Keep the target's hidden states on the disk (bfloat16): the target reads each text once.", flag
        ),
    )
    minutes: float | None = field(
        default=None,
        metadata=option("Stop after so many minutes of training, at the next step; the same call continues.", _minutes),
    )
    layout: str = field(
        default="speculators",
        metadata=option("Layout of an EAGLE-3 head's checkpoint.", OneOf(("speculators", "specforge"))),
    )
    block_size: int = field(
        default=8,
        metadata=option("Tokens of a block drafter's block: the newest token, and the drafts.", WholeNumber(2)),
    )
    blocks: int = field(
        default=64, metadata=option("Most blocks of a text that a step trains, after random tokens.", WholeNumber(1))
    )
    head_layers: int = field(default=2, metadata=option("Decoder layers of a block drafter.", WholeNumber(1)))
    markov_rank: int = field(
        default=0,
        metadata=option("Rank of a block drafter's bias by the token before (DSpark's); 0 for none.", WholeNumber(0)),
    )
    sample_from_anchor: bool = field(
        default=False,
        metadata=option("A block of n tokens has n drafts (DSpark's) instead of n - 1 (DFlash's).", flag),
    )
    weights: str = field(
        default="decay",
        metadata=option(
            "Weights of a block drafter's losses: by `decay`, or D-PACE's (`pace`), the drafts expected to be accepted "
            "from each one on.",
            OneOf(("decay", "pace")),
        ),
    )
    variation: float = field(
        default=0.0,
        metadata=option(
            "Share of the total variation in a block drafter's loss; the rest is cross entropy.", Number(0, 1)
        ),
    )

    def as_json(self) -> dict[str, Any]:
        """Options that the training depends on."""
        return {name: value for name, value in asdict(self).items() if name not in self.free and self._has(name)}

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in OF_KINDS:
            value = getattr(self, name)
            if value != self.default_of(name) and not self._has(name):
                kinds = " and ".join(OF_KINDS[name])
                reason = f"only kind {kinds} has this option, and the kind is {self.kind}; leave it out"
                raise InvalidOption(where=self.where, name=name, value=value, reason=reason)

        if self.weights == "pace" and self.decay != self.default_of("decay"):
            reason = "it has no effect with weights='pace'; leave it out"
            raise InvalidOption(where=self.where, name="decay", value=self.decay, reason=reason)

    def _has(self, name: str) -> bool:
        """Return whether the kind has the option ``name``."""
        return self.kind in OF_KINDS.get(name, KINDS)


if __name__ == "__main__":
    print(TrainOptions.table())
