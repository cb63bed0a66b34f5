"""Modes: state, drafting, and what a drafter does after a commit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from transformers import PreTrainedModel

from speccompile.errors import InvalidOption
from speccompile.graph.state import StateSpec
from speccompile.graph.step_form import StepForm
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.hidden_states.options import SaveHiddenStates
from speccompile.modes.network.draft_network import DraftNetwork
from speccompile.passes.base import Pass
from speccompile.passes.step.tap_hidden import Tap

#: Of several drafters, the one whose draft waits for the next step: int64 ``[N]``, its place in
#: :attr:`Mode.drafter_names`.
DRAFT_SOURCE = "draft_source"

#: A row's text and Kmax to at most so many draft tokens, or None.
HostDraft = Callable[[list[int], int], Sequence[int] | None]


@dataclass(frozen=True)
class Mode(ABC):
    """A way to draft. The fields of the dataclass are the options that ``wrap`` takes for it.

    A subclass says what it needs and which passes build it into a step; neither the runtime nor another mode
    knows about it.
    """

    name: ClassVar[str]
    #: Proposals are ready when a step ends, so that the host can choose the smallest tier that serves them.
    ready: ClassVar[bool] = False
    #: :meth:`drafting` names ``draft_probs`` where a rule reads them (``form.probabilities``).
    draft_probs: ClassVar[bool] = False
    #: One forward makes all drafts of a step.
    one_forward: ClassVar[bool] = False
    #: Where its drafter runs.
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    #: Its drafts can be a tree.
    drafts_trees: ClassVar[bool] = False
    #: Where they can be.
    tree_devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    #: It drafts from hidden states of the target.
    drafts_from_hidden: ClassVar[bool] = False
    #: It drafts by forwards of the target's own layers, over their state.
    runs_target_layers: ClassVar[bool] = False
    #: The option that has a network's weights rounded.
    rounded_by: ClassVar[str] = "draft_weights"

    @property
    def label(self) -> str:
        """The name, for people; of several drafters all their names."""
        return "+".join(self.drafter_names)

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """Its drafters. A mode of several has the state :data:`DRAFT_SOURCE`."""
        return (self.name,)

    @property
    def host_draft(self) -> HostDraft | None:
        """A drafter on the host, which proposes for each row before a step; such a mode has
        :func:`~speccompile.modes.ready_mode.proposal_state`. None for one that is part of the step."""
        return None

    @property
    def saves(self) -> SaveHiddenStates | None:
        """What it saves besides, as ``wrap(save_hidden_states=...)`` does beside any mode."""
        return None

    @classmethod
    def options(cls) -> list[str]:
        """The names of the options that ``wrap`` accepts for this mode."""
        return [item.name for item in fields(cls)]

    def check(self, info: ModelInfo) -> None:  # noqa: B027  most modes fit every model
        """Refuse options that do not fit the target model.

        Raises:
            InvalidOption: with what would fit.
        """

    def invalid(self, option: str, value: Any, reason: str) -> InvalidOption:
        """What :meth:`check` raises."""
        return InvalidOption(where=f"mode {self.name!r}", name=option, value=value, reason=reason)

    def loaded(self, model: PreTrainedModel) -> Mode:
        """The mode with what it has to load for the target ``model``, before any of its passes are asked for.

        Raises:
            UserError: it cannot draft for that target.
        """
        return self

    @property
    def most_drafts(self) -> int | None:
        """The largest draft length that it is for, once :meth:`loaded`; None is any."""
        return None

    def network(self, model: PreTrainedModel, info: ModelInfo, max_len: int) -> DraftNetwork | None:
        """A network of the mode's own, which is captured beside the target ``model`` and copied into steps by
        :func:`speccompile.modes.network.passes.forward_drafter`. Its KV is state of the arena.

        Args:
            max_len: most tokens of a sequence.

        Raises:
            UserError: it cannot draft for that target.
        """
        return None

    def state(self, tiers: Sequence[int]) -> list[StateSpec]:
        """State tensors of the mode's own.

        Args:
            tiers: draft lengths and trees.
        """
        return []

    @abstractmethod
    def drafting(self, form: StepForm) -> list[Pass]:
        """Passes that provide the fact ``drafts`` in a decode step with drafts (K > 0), and for a tree
        ``drafts_limited`` and ``tree``. Those of a :attr:`split` drafter insert before ``graph.anchors.start``: they
        run in an executable of their own, and what they have named is stored for the step."""

    @property
    def taps(self) -> tuple[Tap, ...]:
        """Places in the target whose hidden states the passes of :meth:`after_commit` read, as ``tapped`` ``[B, T, taps
        * M]``."""
        return ()

    def after_commit(self, form: StepForm) -> list[Pass]:
        """Passes that run after the commit, in every tier and in prompt chunks: they keep a drafter's own state. The
        facts that they provide must hold in the finished step."""
        return []

    @property
    def drafts_chains_alone(self) -> str:
        """Why a mode with :attr:`drafts_trees` drafts no trees with these options; empty if it does."""
        return ""

    @property
    def learns_from(self) -> tuple[int, ...] | None:
        """The decoder layers whose outputs its head reads, once :meth:`loaded`, if that can be trained while it
        drafts."""
        return None

    @property
    def split(self) -> bool:
        """Drafting runs in executables of its own, before the step's; of a drafter that is :attr:`ready`, only where a
        row has no proposal. Otherwise it is part of the step."""
        return False

    @property
    def drafts_in_segments(self) -> bool:
        """Each executable of a split drafter continues the chain of that for the next smaller tier (``form.begin``). A
        policy may stop between them: the state ``draft_chances`` is its input."""
        return False

    @abstractmethod
    def explain(self) -> str:
        """One sentence for people."""
