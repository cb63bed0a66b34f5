"""The options of ``wrap``. Nothing here imports torch: the command line shows and checks them before that.

``python -m speccompile.compiler.options`` prints the table of docs/reference/options.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from speccompile.adapters.options import Adapters, adapters_or_none
from speccompile.errors import InvalidOption, InvalidTiers, shown
from speccompile.graph.tree import chains, in_order
from speccompile.policies import parse_policy
from speccompile.policies.base import LearningPolicy
from speccompile.runtime.options import EngineOptions
from speccompile.utils.kv_forms import KVForm, read_kv
from speccompile.utils.kv_memory import read_kv_memory
from speccompile.utils.numbers import is_int, is_real, python_numbers
from speccompile.utils.options import Options, WholeNumber, flag, flag_or_none, option
from speccompile.utils.weight_forms import Weights, read_weights

if TYPE_CHECKING:
    from speccompile.acceptance import Rule
    from speccompile.calibration.calibration import Calibration
    from speccompile.hidden_states.options import SaveHiddenStates
    from speccompile.passes.base import Pass
    from speccompile.policies import AnyPolicy
    from speccompile.runtime.learning import Learning
    from speccompile.sampling.user import Processor

DEFAULT_MODE = "ngram"
DEFAULT_TIERS = (0, 1, 3, 7)
#: Names that options had, and their names now.
OLDER_NAMES = {"consume": "free_originals"}
#: The default of ``max_len`` for a model with as many positions. A default pool of pages has so many tokens a slot.
DEFAULT_MAX_LEN = 2048


def read_tiers(tiers: Any) -> tuple[int, ...]:
    """Distinct draft lengths and trees, 0 among them, in ascending order of their draft tokens.

    Raises:
        InvalidTiers: ``tiers`` are something else.
    """
    if isinstance(tiers, Iterator):
        # Messages show all values.
        tiers = tuple(tiers)
    try:
        values = tuple(python_numbers(value) for value in tiers)
    except TypeError:
        raise InvalidTiers(tiers=tiers, reason="it must be a sequence") from None
    for value in values:
        if not is_int(value) or value < 0:
            raise InvalidTiers(tiers=tiers, reason=f"{shown(value)} must be a draft length or a Tree")
    if 0 not in values:
        raise InvalidTiers(tiers=tiers, reason="0 is missing")
    if len(set(values)) != len(values):
        raise InvalidTiers(tiers=tiers, reason="a draft length occurs twice")
    return in_order(values)


def _tiers_or_none(where: str, name: str, tiers: Any) -> tuple[int, ...] | None:
    return None if tiers is None else read_tiers(tiers)


def _learning(where: str, name: str, value: Any) -> Learning | None:
    if value is None:
        return None
    from speccompile.runtime.learning import Learning

    if not isinstance(value, Learning) or isinstance(value, type):
        raise InvalidOption(where=where, name=name, value=value, reason="give an OnlineTraining(...), or None")
    return value


def _calibration(where: str, name: str, value: Any) -> Calibration | str | Path | None:
    if value is None or isinstance(value, str | Path):
        return value
    from speccompile.calibration.calibration import Calibration

    if not isinstance(value, Calibration):
        reason = "give what speccompile.calibrate returned, a file that it was saved to, or None"
        raise InvalidOption(where=where, name=name, value=value, reason=reason)
    return value


def _seconds(where: str, name: str, value: Any) -> float:
    if not is_real(value) or not 0 < value < float("inf"):
        raise InvalidOption(where=where, name=name, value=value, reason="must be a number of seconds above 0")
    return float(value)


@dataclass(frozen=True)
class WrapOptions(Options):
    """The arguments of ``wrap`` except the model and ``progress``, with the checks that do not need the model.

    The docstring of :func:`speccompile.wrap` describes each.

    Raises:
        InvalidOption, InvalidTiers, InvalidPolicy: a value is not valid.
        UnknownTier: ``policy`` names a draft length that is not in ``tiers``.
    """

    where: ClassVar[str] = "wrap"
    inputs: ClassVar[tuple[str, ...]] = ("progress",)

    mode: str | Sequence[str] | None = field(default=DEFAULT_MODE, metadata=option("How to draft."))
    tiers: Sequence[int] | None = field(
        default=None,
        metadata=option("Draft lengths to build, 0 among them, and trees (`speccompile.Tree`).", _tiers_or_none),
    )
    max_batch: int = field(
        default=1, metadata=option("Number of slots: most requests that run at a time.", WholeNumber(1))
    )
    max_len: int | None = field(
        default=None,
        metadata=option(
            f"Most tokens of a sequence, prompt included. By default the model's positions, but no more than "
            f"{DEFAULT_MAX_LEN}; with several slots, no more than the default pool of `kv_memory` holds.",
            WholeNumber(2, or_none=True),
        ),
    )
    backend: str = field(default="auto", metadata=option("What compiles the steps."))
    policy: str | AnyPolicy | None = field(default=None, metadata=option("What chooses the draft length of each step."))
    acceptance: str | Rule | None = field(
        default=None, metadata=option("The rule that accepts or rejects draft tokens.")
    )
    deterministic: bool | None = field(
        default=None,
        metadata=option(
            "Whether logits are independent, in every bit, of the tier and of the other rows.", flag_or_none
        ),
    )
    weights: Weights = field(
        default="same", metadata=option("The form of the weights of linears and embeddings.", read_weights)
    )
    calibration: Calibration | str | Path | None = field(
        default=None,
        metadata=option("What `speccompile.calibrate` gathered, or its file: `int4` rounds by it.", _calibration),
    )
    kv: KVForm = field(default="same", metadata=option("The form of cached keys and values.", read_kv))
    kv_memory: int | str | None = field(
        default=None,
        metadata=option(
            "The size of a pool of pages of KV that all slots share, in tokens or as `4GiB`. If it and `max_len` are "
            f"left out, several slots on a CPU have {DEFAULT_MAX_LEN} tokens for each.",
            read_kv_memory,
        ),
    )
    max_waiting: int = field(
        default=EngineOptions.max_waiting,
        metadata=option("Most requests of `spec.engine` that wait for a slot.", WholeNumber(0)),
    )
    prefill_budget: int | None = field(
        default=EngineOptions.prefill_budget,
        metadata=option(
            "Most prompt tokens that `spec.engine` processes between two decode steps.", WholeNumber(1, or_none=True)
        ),
    )
    prefix_reuse: bool = field(
        default=EngineOptions.prefix_reuse,
        metadata=option(
            "Whether a prompt that begins like another sequence in the arena reuses the KV of that one.", flag
        ),
    )
    state_checkpoints: int | None = field(
        default=EngineOptions.state_checkpoints,
        metadata=option(
            "Tokens between two checkpoints of recurrent state, from which a prompt continues that differs from a "
            "known sequence.",
            WholeNumber(1, or_none=True),
        ),
    )
    sampling: bool = field(
        default=False, metadata=option("Whether the executables that draw tokens are built at once.", flag)
    )
    logits_processor: Processor | Sequence[Processor] | None = field(
        default=None, metadata=option("Your own `LogitsProcessor`, or a list of them, for every request.")
    )
    scores: bool = field(
        default=False, metadata=option("Whether the arena holds `output_logits` and `output_scores`.", flag)
    )
    free_originals: bool = field(default=False, metadata=option("Whether to keep one copy of the weights.", flag))
    save_hidden_states: SaveHiddenStates | str | Path | None = field(
        default=None, metadata=option("The folder for the target's hidden states of every sequence.")
    )
    passes: Sequence[Pass] = field(default=(), metadata=option("Your own passes."))
    learn: Learning | None = field(
        default=None, metadata=option("How the draft head learns from what is served: an `OnlineTraining`.", _learning)
    )
    adapters: Adapters | None = field(
        default=None,
        metadata=option("How many LoRA adapters can be loaded at a time: an `Adapters(count=...)`.", adapters_or_none),
    )
    rank_timeout: float = field(
        default=60.0,
        metadata=option("Seconds without an answer after which a rank of a sharded model counts as lost.", _seconds),
    )
    #: Options of the mode, by name. :func:`speccompile.modes.create` checks them.
    mode_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy is not None:
            policy = parse_policy(self.policy, self.draft_lens)
            if isinstance(policy, LearningPolicy):
                # These policies choose among draft lengths, never trees.
                policy.check(chains(self.draft_lens))

    @property
    def draft_lens(self) -> tuple[int, ...]:
        """The draft lengths and trees to build, ascending: ``tiers``, or the default ones."""
        return DEFAULT_TIERS if self.tiers is None else tuple(self.tiers)

    @property
    def engine(self) -> EngineOptions:
        """The options of the engine."""
        return EngineOptions(**{item.name: getattr(self, item.name) for item in fields(EngineOptions)})

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``wrap``, and what a package's manifest holds."""
        return {name: getattr(self, name) for name in self.names()} | dict(self.mode_options)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> WrapOptions:
        """The options of a call of ``wrap`` with these keyword arguments, which may have older names."""
        arguments = {OLDER_NAMES.get(name, name): value for name, value in arguments.items()}
        own = {name: value for name, value in arguments.items() if name in cls.names()}
        return cls(**own, mode_options={name: value for name, value in arguments.items() if name not in own})


if __name__ == "__main__":
    print(WrapOptions.table())
