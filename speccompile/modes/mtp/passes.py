"""Passes of a chain of MTP modules: updating the state of all modules at every tier, and drafting.

The target has read L - 1 tokens of a sequence of L tokens. Row i of module k reads the token at position i + k + 1, so
the rows up to L - 2 - k can be computed. For each position p that the target reads, every module reads the token at p +
1. For module k this is row p - k. To draft the k-th token after the first, module k reads the k drafts before it, as
its rows L - 1 - k .. L - 2.

With ``chain="module"`` a row reads the previous module's output at that row (DeepSeek-V3's report; transformers). With
``chain="target"`` a row of a committed token reads the target's own hidden state before that token, and a row of a
draft token reads the previous module's output (TensorRT-LLM's ``MTPWorker``, ``_torch/speculative/mtp.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.splicing import PREFIX
from speccompile.graph.step_graph import StepGraph
from speccompile.modes.mtp.network import READ_FROM, Chain
from speccompile.modes.network.head_passes import NEWEST
from speccompile.modes.network.passes import DraftByNetwork, drafter_of, forward_drafter
from speccompile.ops.draft_rows import form_of, tokens_after
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.draft_chain import Forward, one_after_another


@dataclass(frozen=True)
class KeepModulesWarm(Pass):
    """Compute every module's rows for the positions that the target has read. Their next tokens are known after the
    commit.

    The modules' outputs at each sequence's newest row are stored for drafting. KV of rejected drafts stays after the
    end of the sequence. The next step overwrites it before any query attends to it.
    """

    chain: Chain

    name: ClassVar[str] = "keep_modules_warm"
    looks_for: ClassVar[str] = "what the target reads"
    region: ClassVar[PassRegion] = "propose"
    requires: ClassVar[Facts] = facts("target_inputs", "committed", "tapped")
    provides: ClassVar[Facts] = facts("drafter_read")

    def run(self, graph: StepGraph) -> Changes:
        head, values = drafter_of(graph), graph.values
        slots, positions = values.get("target_slots", values["slots"]), values["positions"]
        tokens = graph.insert(form_of(tokens_after, graph.facts), graph.state("tokens"), slots, positions)

        def read(rows: fx.Node, outputs: list[str], given: dict[str, fx.Node]) -> list[fx.Node]:
            return forward_drafter(graph, tokens, rows, slots, before=graph.output, outputs=outputs, given=given)

        # The input of module 0: a projection of the target's hidden states, or these themselves.
        fused = ["fused"] * ("fused" in head.values)
        hidden, *states = read(positions, ["hidden_0", *fused], {"hidden_states": values["tapped"]})
        left, modules = [hidden], len(head.anchors.layers)
        rows_of = self._rows(graph, slots, positions)
        for module in range(1, modules):
            if self.chain == "module":
                nodes = (left[-1], graph.state(NEWEST), slots, positions)
                given = {f"hidden_{module - 1}": graph.insert(shifted_by_one, *nodes, module=module - 1)}
            else:
                given = {f"carried_{module - 1}": (states or [values["tapped"]])[0]}
            left += read(rows_of(module), [f"hidden_{module}"], given)
        stored = left if self.chain == "module" else left[:1]
        state = (graph.state(NEWEST), graph.state("length"))
        graph.insert(store_last, *state, slots, positions, *stored, dummy_slot=graph.layout.dummy_slot)
        return Changes(modules, f"{modules} modules read {list(tokens.meta['val'].shape)}")

    def _rows(self, graph: StepGraph, slots: fx.Node, positions: fx.Node) -> Callable[[int], fx.Node]:
        """A function that inserts the positions of the rows of a module after the first."""
        head, values = drafter_of(graph), graph.values
        dead = head.layout.cache_len - 1
        if self.chain == "module":
            since = graph.insert(first_read, graph.state(f"{PREFIX}{READ_FROM}"), slots, positions)
            return lambda module: graph.insert(rows_since, positions, since, back=module, dead=dead)
        # At K=0 no row has drafts.
        draft_len = int(values["drafts"].meta["val"].shape[1]) if "drafts" in values else 0
        rows = int(values["slots"].meta["val"].shape[0])
        nodes, modules = (positions, graph.state("length"), slots), len(head.anchors.layers)
        return lambda module: graph.insert(
            undrafted_rows,
            *nodes,
            module=module,
            modules=modules,
            judged=rows if module < draft_len else 0,
            dead=dead,
        )


@dataclass(frozen=True)
class DraftByModules(DraftByNetwork):
    """Draft with one module for each token. The first draft comes from module 0's stored output of the newest row."""

    chain: Chain = field(kw_only=True)

    name: ClassVar[str] = "draft_by_modules"
    looks_for: ClassVar[str] = "the mode's modules"

    def forward(self, graph: StepGraph) -> Forward:
        head, slots, start = drafter_of(graph), graph.values["slots"], graph.anchors.start
        last, dead = len(head.anchors.layers) - 1, head.layout.cache_len - 1
        tokens: list[fx.Node] = []
        # The previous module's outputs at its draft tokens; each module's hidden state at its newest token.
        hidden: list[fx.Node] = []
        carried: list[fx.Node] = []

        def stored(module: int) -> fx.Node:
            node: fx.Node = graph.insert(gather_module, graph.state(NEWEST), slots, before=start, module=module)
            return node

        def forward(token: fx.Node, position: fx.Node, place: int) -> fx.Node:
            rows = graph.insert(drafted_rows, position, before=start, module=place, dead=dead)
            if place == 0:
                # Module 0 has computed its newest row when the token was committed.
                given = {"hidden_0": stored(0)}
            elif self.chain == "module":
                given = {
                    f"hidden_{place - 1}": graph.insert(one_after_another, stored(place - 1), *hidden, before=start)
                }
            else:
                given = {f"carried_{place - 1}": graph.insert(one_after_another, *carried, before=start)}
            tokens[:] = [*tokens, token] if place > 1 else [token]
            read = graph.insert(one_after_another, *tokens, before=start)
            outputs = [f"{name}_{place}" for name in ("hidden", "normed", "carried")]
            found = forward_drafter(graph, read, rows, slots, before=start, outputs=outputs, given=given)
            hidden[:] = found[:1] if place else []
            newest, carry = graph.insert(newest_rows, *found[1:], before=start)
            carried.append(carry)
            (logits,) = forward_drafter(graph, token, rows, slots, before=start, given={f"normed_{last}": newest})
            return logits

        return forward

    def what(self, graph: StepGraph) -> str:
        return f"{self.draft_len - 1} modules after the first"


def first_read(read_from: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The first position ``[B]`` that was read of each row's sequence.

    The first step that reads a sequence writes it to ``read_from`` ``[N]``. A slot can have several rows (of a
    prompt).
    """
    same = slots[:, None] == slots
    first = torch.where(same, positions[:, 0], torch.iinfo(torch.int64).max).amin(1)
    known = read_from[slots]
    since = torch.where(known < 0, first, known)
    read_from.index_put_((slots,), since)
    return since


def rows_since(positions: torch.Tensor, since: torch.Tensor, *, back: int, dead: int) -> torch.Tensor:
    """The rows ``[B, T]`` of a module that are computed with ``positions`` ``[B, T]``: ``back`` positions earlier.

    Rows before ``since`` ``[B]``, the first position that was read, are known already. They are ``dead``, a position
    that no sequence uses.
    """
    rows = positions - back
    return torch.where(rows < since[:, None], dead, rows)


def undrafted_rows(
    positions: torch.Tensor,
    length: torch.Tensor,
    slots: torch.Tensor,
    *,
    module: int,
    modules: int,
    judged: int,
    dead: int,
) -> torch.Tensor:
    """The rows ``[B, T]`` of a module after the first that read the target's hidden states.

    A row is ``dead`` if it is before the sequence, or if its state from drafting stays. TensorRT-LLM reads the newest
    tokens again, as many as modules, including drafts. An accepted draft that is not one of them keeps its state.

    Args:
        judged: the number of the B rows that begin with tokens that the module has read as drafts.
    """
    rows = positions - module
    written = rows >= 0
    if judged:
        places = torch.arange(positions.shape[1], device=positions.device)
        lines = torch.arange(positions.shape[0], device=positions.device)
        drafted = (places < module) & (lines < judged)[:, None]
        again = positions >= (length[slots] - 1 - modules + module)[:, None]
        written = written & (again | ~drafted)
    return torch.where(written, rows, dead)


def shifted_by_one(
    hidden: torch.Tensor, newest: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, *, module: int
) -> torch.Tensor:
    """``hidden`` ``[B, T, M]`` of a module, shifted by one position.

    The first position is the stored state in ``newest`` ``[N, modules, M]``, or the end of the previous row if that row
    belongs to the same sequence.
    """
    front = newest[slots, module]
    before = torch.roll(slots, 1) == slots
    follows = before & (torch.roll(positions[:, -1], 1) + 1 == positions[:, 0])
    front = torch.where(follows[:, None], torch.roll(hidden[:, -1], 1, 0), front)
    return torch.cat([front[:, None], hidden[:, :-1]], dim=1)


def store_last(
    newest: torch.Tensor,
    length: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    *hidden: torch.Tensor,
    dummy_slot: int,
) -> None:
    """Write each module's ``hidden`` ``[B, T, M]`` at the last position that was read, at most ``length - 2``, into
    ``newest`` ``[N, modules, M]``.

    Rows without that position write to the dummy slot.
    """
    width = positions.shape[1]
    at = (length[slots] - 2 - positions[:, 0]).clamp(max=width - 1)
    continues = (torch.roll(slots, -1) == slots) & (torch.roll(positions[:, 0], -1) == positions[:, -1] + 1)
    continues = continues & (length[slots] - 2 > positions[:, -1])
    stored = (at >= 0) & ~continues
    rows = torch.arange(slots.shape[0], device=slots.device)
    found = torch.stack([each[rows, at.clamp(min=0)] for each in hidden], dim=1)
    newest.index_put_((torch.where(stored, slots, dummy_slot),), found)


def gather_module(newest: torch.Tensor, slots: torch.Tensor, *, module: int) -> torch.Tensor:
    """The entries ``[B, 1, M]`` of ``newest`` ``[N, modules, M]`` for one module and the rows' slots."""
    return newest[slots, module][:, None]


def drafted_rows(position: torch.Tensor, *, module: int, dead: int) -> torch.Tensor:
    """The rows ``[B, module]`` (one for module 0) that a module computes for the token at ``position`` ``[B, 1]``.

    The last row is the one before the first draft token. Rows before the sequence are ``dead``.
    """
    # The module-th draft token is ``module`` positions after the newest committed token.
    rows = position - module - 1 - torch.arange(max(module, 1) - 1, -1, -1, device=position.device)
    return torch.where(rows < 0, dead, rows)


def newest_rows(*hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The last position ``[B, 1, M]`` of each ``[B, T, M]``."""
    return tuple(each[:, -1:] for each in hidden)
