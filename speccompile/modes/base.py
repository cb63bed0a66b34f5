"""The base class of modes: state, the passes that draft, and the passes that update a drafter after a commit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.errors import InvalidOption
from speccompile.graph.state import DrafterMemory, StateSpec
from speccompile.graph.step_form import StepForm
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.hidden_states.options import SaveHiddenStates
from speccompile.modes.network.draft_network import DraftNetwork
from speccompile.passes.base import Pass
from speccompile.passes.step.tap_hidden import Tap
from speccompile.utils.earlier_members import refuse_earlier_members
from speccompile.utils.weight_forms import WeightForm

#: State of a mode with several drafters, int64 ``[N]``: the drafter of the stored drafts, as an index of
#: :attr:`Mode.drafter_names`.
DRAFT_SOURCE = "draft_source"

_DRAFTING = "Return the passes from drafting(form)"
_AFTER_COMMIT = "Return the passes from after_commit(form)"
_READ = "Remove it: of a split drafter, the package stores and reads what the passes of drafting(form) have named"
_STATE = "Return the state tensors from state(tiers)"
#: The replacement of each member that an earlier version called.
_EARLIER = {
    "draft_passes": _DRAFTING,
    "sampled_draft_passes": _DRAFTING,
    "tree_draft_passes": _DRAFTING,
    "drafter_passes": _DRAFTING,
    "tree_drafter_passes": _DRAFTING,
    "segment_passes": f"{_DRAFTING}, which continues after form.begin drafts",
    "drafter_chunk_passes": _AFTER_COMMIT,
    "commit_passes": _AFTER_COMMIT,
    "tree_commit_passes": _AFTER_COMMIT,
    "mark_passes": "Return the positions in the target from taps",
    "read_passes": _READ,
    "tree_read_passes": _READ,
    "tree_state": _STATE,
    "state()": _STATE,
}

#: ``(token ids of a row's sequence, Kmax) -> at most Kmax draft tokens``, or None for no drafts.
HostDraft = Callable[[list[int], int], Sequence[int] | None]


@dataclass(frozen=True)
class Mode(ABC):
    """A way to draft. The fields of the dataclass are the options that ``wrap`` accepts for it.

    A subclass defines its state, and the passes that build it into a step. Neither the runtime nor another mode depends
    on the subclass.
    """

    name: ClassVar[str]
    #: Proposals are ready when a step ends. The host can then choose the smallest tier that verifies them.
    ready: ClassVar[bool] = False
    #: :meth:`drafting` names ``draft_probs`` if the acceptance rule reads them (``form.probabilities``).
    draft_probs: ClassVar[bool] = False
    #: One forward computes all drafts of a step.
    one_forward: ClassVar[bool] = False
    #: The device types that its drafter supports.
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    #: Its drafts can be trees.
    drafts_trees: ClassVar[bool] = False
    #: The device types on which they can be trees.
    tree_devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    #: It drafts from hidden states of the target.
    drafts_from_hidden: ClassVar[bool] = False
    #: It drafts with forwards of the target's own layers, which read and write the target's state.
    runs_target_layers: ClassVar[bool] = False
    #: The name of the option that rounds the weights of the drafter's network.
    rounded_by: ClassVar[str] = "draft_weights"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_earlier_members(cls, "speccompile.modes.Mode", _EARLIER)

    @property
    def label(self) -> str:
        """The name for reports; for several drafters, all their names."""
        return "+".join(self.drafter_names)

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """The names of its drafters. A mode with several drafters has the state :data:`DRAFT_SOURCE`."""
        return (self.name,)

    @property
    def host_draft(self) -> HostDraft | None:
        """A drafter on the host, which proposes for each row before a step. None if the drafter is part of the step.

        A mode with such a drafter has the state :func:`~speccompile.modes.ready_mode.proposal_state`.
        """
        return None

    @property
    def saves(self) -> SaveHiddenStates | None:
        """The hidden states that the mode saves; None for none. ``wrap(save_hidden_states=...)`` saves them in any
        mode."""
        return None

    @classmethod
    def options(cls) -> list[str]:
        """The names of the options that ``wrap`` accepts for this mode."""
        return [item.name for item in fields(cls)]

    def check(self, info: ModelInfo) -> None:  # noqa: B027  most modes fit every model
        """Refuse options that do not fit the target model.

        Raises:
            InvalidOption: the message states the values that fit.
        """

    def invalid(self, option: str, value: Any, reason: str) -> InvalidOption:
        """The error that :meth:`check` raises for ``value``."""
        return InvalidOption(where=f"mode {self.name!r}", name=option, value=value, reason=reason)

    def loaded(self, model: PreTrainedModel) -> Mode:
        """The mode after loading its head or draft model for the target ``model``. It is called before the mode's
        passes are built.

        Raises:
            UserError: the mode cannot draft for that target.
        """
        return self

    def with_draft_weights(self, form: WeightForm) -> Mode:
        """The mode with ``form`` in place of ``draft_weights="auto"``; the mode itself if it has no such option."""
        return self

    @property
    def adaptable_head(self) -> nn.Module | None:
        """The head that an adapter can have with other weights, after :meth:`loaded`; None if the mode has no such
        head."""
        return None

    def with_head(self, head: Any) -> Mode:
        """The mode with ``head`` in place of its :attr:`adaptable_head`, before :meth:`loaded`. A mode that has such a
        head defines it."""
        raise NotImplementedError(f"mode {self.name!r} has an adaptable_head: define its with_head")

    @property
    def most_drafts(self) -> int | None:
        """The largest draft length that the mode supports, after :meth:`loaded`; None is any."""
        return None

    def drafts_up_to(self, max_len: int) -> int:
        """The largest number of tokens of a sequence that its network drafts for; at most ``max_len``, that of
        ``wrap``."""
        return max_len

    def network(self, model: PreTrainedModel, info: ModelInfo, max_len: int) -> DraftNetwork | None:
        """The mode's own network, or None. It is captured in addition to the target ``model``.

        :func:`speccompile.modes.network.passes.forward_drafter` copies it into steps. Its KV is state of the arena.

        Args:
            max_len: the result of :meth:`drafts_up_to`.

        Raises:
            UserError: the network cannot draft for that target.
        """
        return None

    def state(self, tiers: Sequence[int]) -> list[StateSpec]:
        """The mode's own state tensors.

        Args:
            tiers: the draft lengths and trees of all tiers.
        """
        return []

    @abstractmethod
    def drafting(self, form: StepForm) -> list[Pass]:
        """Passes that provide the fact ``drafts`` in a decode step with drafts (K > 0), and for a tree also the facts
        ``drafts_limited`` and ``tree``.

        Passes of a :attr:`split` drafter insert their ops before ``graph.anchors.start``. They run in a separate
        executable, which stores the values that they have named for the step.
        """

    @property
    def taps(self) -> tuple[Tap, ...]:
        """Positions in the target whose hidden states the passes of :meth:`after_commit` read. The step names these
        hidden states ``tapped``, ``[B, T, taps * M]``."""
        return ()

    @property
    def memory(self) -> DrafterMemory:
        """Its state that outlives requests, which ``Speculator.save_memory`` writes."""
        return DrafterMemory()

    def start(self, state: Mapping[str, torch.Tensor]) -> None:  # noqa: B027  most state begins with a constant
        """Write initial values to its own tensors of ``state``, for what :class:`~speccompile.graph.state.StateSpec`
        cannot state."""

    def after_logits(self, form: StepForm) -> list[Pass]:
        """Passes that read the target's logits, of every position that a step or the end of a prompt computes, before
        tokens are chosen."""
        return []

    def after_commit(self, form: StepForm) -> list[Pass]:
        """Passes that run after the commit, in every tier and in prompt chunks. They update the drafter's own state.

        The facts that they provide must hold in the finished step.
        """
        return []

    def unread_tokens(self, deepest: int) -> int:
        """Most tokens of a sequence that the target may read before the drafter reads them; 0 if the passes of
        :meth:`after_commit` update the drafter in every step.

        If not 0, the passes of :meth:`drafting` begin with reading up to ``deepest + 1`` tokens, and those of
        :meth:`catching_up` read all of them. In prompt chunks and mixed steps, those of :meth:`after_commit` update the
        drafter.

        Args:
            deepest: most drafts that a step accepts.
        """
        return 0

    def catching_up(self, form: StepForm) -> list[Pass]:
        """Passes of the executable that reads up to ``form.chunk`` tokens of one sequence, which insert their ops
        before ``graph.anchors.start``; see :meth:`unread_tokens`."""
        return []

    @property
    def drafts_chains_alone(self) -> str:
        """The reason why a mode with :attr:`drafts_trees` drafts no trees with these options; empty if it drafts
        trees."""
        return ""

    @property
    def learns_from(self) -> tuple[int, ...] | None:
        """The decoder layers whose outputs its head reads, after :meth:`loaded`. None if the head cannot be trained
        while it drafts."""
        return None

    @property
    def split(self) -> bool:
        """Whether drafting runs in separate executables, before the step's, and not inside of the step.

        For a mode that is also :attr:`ready`, they run only if a row has no proposal.
        """
        return False

    @property
    def drafts_in_segments(self) -> bool:
        """Whether each executable of a split drafter continues the chain of the next smaller tier's (``form.begin``).

        A policy can stop between the executables. Its input is the state ``draft_chances``.
        """
        return False

    @abstractmethod
    def explain(self) -> str:
        """A description in one sentence, for reports."""
