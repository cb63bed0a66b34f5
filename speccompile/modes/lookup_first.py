"""``mode=["suffix", "eagle3_one_model"]``: a row uses a confident lookup's draft, or else a network's.

Every step updates the network's state. The network drafts in a separate executable before the step. This executable
runs only if a row has no lookup that is good enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.graph.state import DrafterMemory, StateSpec
from speccompile.graph.step_form import StepForm
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.base import Mode
from speccompile.modes.composed import Composed
from speccompile.modes.network.draft_network import DraftNetwork
from speccompile.modes.network.network_mode import NetworkMode, SplitMode
from speccompile.modes.ready_mode import ReadyMode
from speccompile.passes.base import Pass
from speccompile.passes.step.tap_hidden import Tap
from speccompile.utils.weight_forms import WeightForm


@dataclass(frozen=True)
class LookupFirst(Mode):
    """Lookups, and a network for rows whose lookups do not pass.

    Args:
        lookups: the lookups. The draft of each, including the last, passes by the rule of
            :class:`~speccompile.modes.composed.Composed`.
        network_mode: the mode that drafts for the other rows.
    """

    lookups: Composed
    network_mode: NetworkMode

    name: ClassVar[str] = "lookup_first"
    ready: ClassVar[bool] = True

    @property
    def drafter_names(self) -> tuple[str, ...]:
        return (*self.lookups.drafter_names, self.network_mode.name)

    @property
    def draft_probs(self) -> bool:  # type: ignore[override]
        return self.network_mode.draft_probs

    @property
    def devices(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(device for device in self.network_mode.devices if device in self.lookups.devices)

    @property
    def memory(self) -> DrafterMemory:
        return self.lookups.memory

    def start(self, state: Mapping[str, torch.Tensor]) -> None:
        self.lookups.start(state)

    @property
    def rounded_by(self) -> str:  # type: ignore[override]
        return self.network_mode.rounded_by

    @property
    def drafts_from_hidden(self) -> bool:  # type: ignore[override]
        return self.network_mode.drafts_from_hidden

    @property
    def split(self) -> bool:
        return True

    @property
    def most_drafts(self) -> int | None:
        return self.network_mode.most_drafts

    @property
    def learns_from(self) -> tuple[int, ...] | None:
        return self.network_mode.learns_from

    @property
    def adaptable_head(self) -> nn.Module | None:
        return self.network_mode.adaptable_head

    def with_head(self, head: Any) -> Mode:
        return self.network_mode.with_head(head)

    def check(self, info: ModelInfo) -> None:
        self.lookups.check(info)
        self.network_mode.check(info)

    def loaded(self, model: PreTrainedModel) -> LookupFirst:
        loaded = self.network_mode.loaded(model)
        assert isinstance(loaded, NetworkMode)
        return replace(self, network_mode=loaded)

    def with_draft_weights(self, form: WeightForm) -> LookupFirst:
        decided = self.network_mode.with_draft_weights(form)
        return self if decided is self.network_mode else replace(self, network_mode=decided)

    def drafts_up_to(self, max_len: int) -> int:
        return self.network_mode.drafts_up_to(max_len)

    def network(self, model: PreTrainedModel, info: ModelInfo, max_len: int) -> DraftNetwork | None:
        return self.network_mode.network(model, info, max_len)

    def state(self, tiers: Sequence[int]) -> list[StateSpec]:
        return [*self.lookups.state(()), *self.network_mode.state(tiers)]

    @property
    def drafts_trees(self) -> bool:  # type: ignore[override]
        return self.network_mode.drafts_trees

    @property
    def one_forward(self) -> bool:  # type: ignore[override]
        return self.network_mode.one_forward

    @property
    def drafts_chains_alone(self) -> str:
        return self.network_mode.drafts_chains_alone

    def drafting(self, form: StepForm) -> list[Pass]:
        return self.network_mode.drafting(form)

    def unread_tokens(self, deepest: int) -> int:
        return self.network_mode.unread_tokens(deepest)

    def catching_up(self, form: StepForm) -> list[Pass]:
        return self.network_mode.catching_up(form)

    @property
    def taps(self) -> tuple[Tap, ...]:
        return self.network_mode.taps

    def after_logits(self, form: StepForm) -> list[Pass]:
        return self.lookups.after_logits(form)

    def after_commit(self, form: StepForm) -> list[Pass]:
        # Trees are the network's: a lookup that passes is a tree of one branch.
        return [*self.network_mode.after_commit(form), *self.lookups.after_commit(replace(form, trees=False))]

    def explain(self) -> str:
        return f"{self.lookups.explain()}; elsewhere {self.network_mode.explain()}"


def lookup_first(lookups: tuple[ReadyMode, ...], network_mode: NetworkMode, **options: Any) -> LookupFirst:
    """Compose lookups and a network.

    Args:
        options: the options of :class:`~speccompile.modes.composed.Composed`.
    """
    # The composition runs the drafting in separate executables, but not in segments.
    if isinstance(network_mode, SplitMode):
        network_mode = replace(network_mode, fused=True)
    return LookupFirst(Composed(lookups, last_always=False, **options), network_mode)
