"""The split form: a drafter's executables run before the target's, and drafts pass through the arena."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.errors import PassError
from speccompile.graph.step_graph import Anchors, StepGraph, Values
from speccompile.modes.network.passes import forward_model
from speccompile.passes.base import Changes, Facts, Pass, facts
from speccompile.passes.step.drafts import ReadDrafts
from speccompile.passes.step.verify_inputs import newest_and_drafts, prompt_chunk

#: State ``[N, K, V]``, float32; in a step's graph ``draft_probs`` are its rows'.
PROBABILITIES = "stored_draft_probs"


@dataclass(frozen=True)
class StoreDrafts(Pass):
    """Leaves a step's drafts, their lengths and, if asked, what they were drawn from, for the target's executable, in
    the state tensors ``tokens`` and ``lens``. ``begin`` drafts are there already."""

    probabilities: bool = False
    tokens: str = "draft_tokens"
    lens: str = "draft_lens"
    begin: int = 0

    name: ClassVar[str] = "store_drafts"
    looks_for: ClassVar[str] = "drafts"
    requires: ClassVar[Facts] = facts("rows", "drafts")
    provides: ClassVar[Facts] = facts("drafts_stored")

    def run(self, graph: StepGraph) -> Changes:
        kept = {"drafts": self.tokens, "row_draft_lens": self.lens}
        kept |= {"draft_probs": PROBABILITIES} if self.probabilities else {}
        values = [graph.values[name] for name in kept]
        state = [graph.state(name) for name in kept.values()]
        graph.insert(store, graph.values["slots"], *values, *state, before=graph.anchors.start, begin=self.begin)
        return Changes(len(kept))


@dataclass(frozen=True)
class ReadStoredDrafts(ReadDrafts):
    """Takes what :class:`StoreDrafts` left."""

    probabilities: bool = False

    name: ClassVar[str] = "read_stored_drafts"
    looks_for: ClassVar[str] = "what the drafter's executable left"

    def run(self, graph: StepGraph) -> Changes:
        changes = super().run(graph)
        if self.probabilities:
            nodes = (graph.state(PROBABILITIES), graph.values["slots"])
            drawn_from = graph.insert(of_rows, *nodes, before=graph.anchors.start, draft_len=self.draft_len)
            graph.name_value("draft_probs", drawn_from)
        return changes


@dataclass(frozen=True)
class ReadNewest(Pass):
    """The drafter reads what the target is going to read: the newest token and the drafts."""

    draft_len: int

    name: ClassVar[str] = "read_newest"
    looks_for: ClassVar[str] = "drafts"
    requires: ClassVar[Facts] = facts("outlined", "rows", "drafts")
    provides: ClassVar[Facts] = facts("drafter_read")

    def run(self, graph: StepGraph) -> Changes:
        slots, start = graph.values["slots"], graph.anchors.start
        read, positions = graph.insert(
            newest_and_drafts,
            graph.state("tokens"),
            graph.state("length"),
            slots,
            graph.values["drafts"],
            before=start,
            width=self.draft_len + 1,
            vocab_size=graph.layout.vocab_size,
        )
        forward_model(graph, read, positions, slots, before=start, output="kv")
        graph.sizes = {**graph.sizes, "T": self.draft_len + 1}
        return Changes(1, f"the drafter reads {list(read.meta['val'].shape)}")


@dataclass(frozen=True)
class ReadChunk(Pass):
    """The drafter reads the chunk of a prompt that the target is going to read."""

    width: int

    name: ClassVar[str] = "read_chunk"
    looks_for: ClassVar[str] = "a prompt"
    requires: ClassVar[Facts] = facts("outlined", "rows")
    provides: ClassVar[Facts] = facts("drafter_read")

    def run(self, graph: StepGraph) -> Changes:
        slots, start = graph.values["slots"], graph.anchors.start
        state = [graph.state(name) for name in ("tokens", "length")]
        chunk_start = graph.state("prefill_start")
        read, positions, _, _ = graph.insert(prompt_chunk, *state, slots, chunk_start, before=start, width=self.width)
        forward_model(graph, read, positions, slots, before=start, output="kv")
        graph.sizes = {**graph.sizes, "T": self.width}
        return Changes(1, f"the drafter reads a chunk of {self.width}")


@dataclass(frozen=True)
class DropTarget(Pass):
    """What is left is what was put before the target."""

    name: ClassVar[str] = "drop_target"
    looks_for: ClassVar[str] = "the target's ops"
    requires: ClassVar[Facts] = facts("outlined", "rows")
    provides: ClassVar[Facts] = facts("target_dropped")
    invalidates: ClassVar[Facts] = facts("outlined", "logits")

    def run(self, graph: StepGraph) -> Changes:
        nodes = list(graph.graph.nodes)
        dropped = nodes[nodes.index(graph.anchors.start) : -1]
        kept = [node for node in nodes[: -len(dropped) - 1] if node.op != "placeholder"]
        if not kept:
            raise PassError("the drafter has no op before the target: its passes must insert before the target's start")
        graph.set_outputs()
        last = kept[-1]
        graph.anchors = Anchors(last, last, last, [last], last, last)
        for node in reversed(dropped):
            graph.graph.erase_node(node)
        live = set(graph.graph.nodes)
        graph.values = Values((name, node) for name, node in graph.values.items() if node in live)
        graph.remove_dead_code()
        return Changes(len(dropped), f"{len(dropped)} ops of the target are gone")


def store(slots: torch.Tensor, *tensors: torch.Tensor, begin: int = 0) -> None:
    """Write values of rows, ``[B, ...]``, to the places of state ``[N, ...]`` from ``begin`` on: of ``tensors`` the
    first half into the second."""
    half = len(tensors) // 2
    for value, state in zip(tensors[:half], tensors[half:], strict=True):
        if value.ndim == 1:
            state.index_put_((slots,), value)
        else:
            places = torch.arange(begin, begin + value.shape[1], device=slots.device)
            state.index_put_((slots[:, None], places), value)


def of_rows(stored: torch.Tensor, slots: torch.Tensor, *, draft_len: int) -> torch.Tensor:
    """``[N, Kmax, V]`` to the rows' first places, ``[B, K, V]``."""
    return stored[slots, :draft_len]
