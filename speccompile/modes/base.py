"""What a mode is: the state it needs, where its drafts come from, and what it does after a commit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from transformers import PreTrainedModel

from speccompile.errors import InvalidOption
from speccompile.graph.state import StateSpec
from speccompile.graph.tree import Tree
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.hidden_states.options import SaveHiddenStates
from speccompile.modes.network.draft_network import DraftNetwork
from speccompile.modes.network.split import ReadStoredDrafts
from speccompile.modes.network.split_tree import ReadStoredTree
from speccompile.passes.base import Facts, Pass, facts

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
    #: :meth:`sampled_draft_passes` leaves ``draft_probs`` where a rule looks at them.
    draft_probs: ClassVar[bool] = False
    #: One forward makes all drafts of a step.
    one_forward: ClassVar[bool] = False
    #: Where its drafter runs.
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    #: Of a split drafter that is ready, too: its executables run only where a row has no proposal.
    network_on_demand: ClassVar[bool] = False
    #: Its drafts can be a tree: :meth:`tree_draft_passes`, :meth:`tree_state` and :meth:`tree_commit_passes`.
    drafts_trees: ClassVar[bool] = False
    #: Where they can be.
    tree_devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    #: An option makes it :attr:`split`.
    splits: ClassVar[bool] = False
    #: It drafts from hidden states of the target.
    drafts_from_hidden: ClassVar[bool] = False
    #: It drafts by forwards of the target's own layers, over their state.
    runs_target_layers: ClassVar[bool] = False
    #: Whose checkpoint has the weights that it drafts with, besides the target's layers.
    weights_from: ClassVar[Literal["nowhere", "drafter", "target"]] = "nowhere"
    #: The option that has a network's weights rounded.
    rounded_by: ClassVar[str] = "draft_weights"
    #: What must hold in a finished step, besides what every step has to have.
    goals: ClassVar[Facts] = facts()

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

    def state(self) -> list[StateSpec]:
        """State tensors of the mode's own."""
        return []

    @abstractmethod
    def draft_passes(self, draft_len: int) -> list[Pass]:
        """Passes that provide the fact ``drafts`` in a step of the tier ``draft_len`` (K > 0)."""

    def sampled_draft_passes(self, draft_len: int, *, probabilities: bool) -> list[Pass]:
        """The same in a step that draws its tokens: for its own drafter with probabilities, which then draws with
        the target's noise.

        Args:
            probabilities: the acceptance rule looks at them: name them ``draft_probs``, float32 ``[B, K, V]``, and draw
                with noise of the step's own (``DRAFTS``). A mode that does says ``draft_probs = True``; a drafter that
                names none counts as certain.
        """
        return self.draft_passes(draft_len)

    def tree_draft_passes(self, tree: Tree, *, draws: bool = False) -> list[Pass]:
        """Of a mode that :attr:`drafts_trees`: passes that provide ``drafts``, ``drafts_limited`` and ``tree`` in a
        step of that shape.

        Args:
            draws: the step draws its tokens: a drafter with probabilities of its own draws with the target's noise.
        """
        raise NotImplementedError(f"mode {self.name!r} has drafts_trees, and needs tree_draft_passes")

    def tree_read_passes(self, tree: Tree) -> list[Pass]:
        """Of a split drafter that :attr:`drafts_trees`: the same in the target's step, from what was stored."""
        return [ReadStoredTree(tree)]

    def tree_drafter_passes(self, tree: Tree, *, draws: bool) -> list[Pass]:
        """Of such a drafter: what runs before a step of that shape, as :meth:`drafter_passes`."""
        return []

    @property
    def drafts_chains_alone(self) -> str:
        """Of a mode that :attr:`drafts_trees`: why it does not with these options; empty if it does."""
        return ""

    def tree_state(self) -> list[StateSpec]:
        """State tensors that it needs besides where a tier is a tree."""
        return []

    def tree_commit_passes(self) -> list[Pass]:
        """Passes that run after :meth:`commit_passes` where a tier is a tree."""
        return []

    def mark_passes(self) -> list[Pass]:
        """Passes that run before the target's inputs are bound, in every tier and in prefill: they mark values of the
        target, such as hidden states, that :meth:`commit_passes` read."""
        return []

    def commit_passes(self) -> list[Pass]:
        """Passes that run after the commit, in every tier and in prefill: a drafter's own state."""
        return []

    @property
    def learns_from(self) -> tuple[int, ...] | None:
        """The decoder layers whose outputs its head reads, once :meth:`loaded`, if that can be trained while it
        drafts."""
        return None

    @property
    def split(self) -> bool:
        """The drafter runs in executables of its own, before the target's, and drafts pass through the arena:
        :meth:`drafter_passes`. Otherwise it is part of the step."""
        return False

    def read_passes(self, draft_len: int, *, probabilities: bool) -> list[Pass]:
        """Of a split drafter: passes that provide ``drafts`` in the target's step, from what was stored."""
        return [ReadStoredDrafts(draft_len, probabilities)]

    def drafter_passes(self, draft_len: int, *, draws: bool, probabilities: bool) -> list[Pass]:
        """Of a split drafter: what runs before a tier, K = 0 included. The passes insert before
        ``graph.anchors.start``, provide ``drafter_read``, unless the step itself does (``goals``), and, where there are
        drafts, ``drafts_stored`` (with ``probabilities``, those too). Empty if nothing has to run."""
        return []

    @property
    def drafts_in_segments(self) -> bool:
        """Each executable of a split drafter continues the chain of that for the next smaller tier
        (:meth:`segment_passes`). A policy may stop between them: the state ``draft_chances`` is its input."""
        return False

    def segment_passes(self, begin: int, draft_len: int, *, draws: bool, probabilities: bool) -> list[Pass]:
        """As :meth:`drafter_passes`, where ``begin`` of the ``draft_len`` drafts are stored already."""
        raise NotImplementedError(f"mode {self.name!r} has drafts_in_segments, and needs segment_passes")

    def drafter_chunk_passes(self, width: int) -> list[Pass]:
        """Of a split drafter: the same before a prompt's chunk, which drafts nothing."""
        return []

    @abstractmethod
    def explain(self) -> str:
        """One sentence for people."""
