"""Mixed steps: a prompt is read along with the rows of a decode step, and both share one reading of the weights.

The prompt's tokens are further rows of the target, all of one slot; each row continues at the end of the row before it.
A layer writes the KV of all rows before any of them attends, and a token sees no position after its own, so they
compute what a prompt chunk computes. After Agrawal et al., "Sarathi-Serve" (2024), section 4.2, stall-free batching.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from speccompile.graph.step_graph import StepGraph
from speccompile.ops.step_inputs import newest_and_drafts
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.last_logits import lm_head_readers
from speccompile.passes.step.rows import first_rows
from speccompile.passes.step.verify_inputs import feed_target


@dataclass(frozen=True)
class BindMixedRows(Pass):
    """Row i of the first ``rows`` works on slot ``slots[i]``; after these, only the target has ``prompt_rows`` more
    rows of ``width`` tokens each, on ``prefill_slot``.

    Names ``slots`` ``[B]``, ``target_slots`` ``[B + prompt_rows]``, and ``prompt_starts`` ``[prompt_rows]``.
    """

    rows: int
    prompt_rows: int
    width: int

    name: ClassVar[str] = "bind_mixed_rows"
    named_values: ClassVar[tuple[str, ...]] = ("slots", "target_slots", "prompt_starts")
    looks_for: ClassVar[str] = "the input row_slots"
    region: ClassVar[PassRegion] = "inputs"
    requires: ClassVar[Facts] = facts("captured")
    provides: ClassVar[Facts] = facts("rows", "prompt_rows")

    def run(self, graph: StepGraph) -> Changes:
        state = [graph.state(name) for name in ("slots", "length", "prefill_slot", "prefill_start")]
        slots, target_slots, starts = graph.insert(
            mixed_rows,
            *state,
            before=graph.anchors.start,
            rows=self.rows,
            prompt_rows=self.prompt_rows,
            width=self.width,
            dummy_slot=graph.layout.dummy_slot,
        )
        graph.bind_input("row_slots", target_slots)
        for name, node in (("slots", slots), ("target_slots", target_slots), ("prompt_starts", starts)):
            graph.values[name] = node
        everything = self.rows + self.prompt_rows
        for name in ("input_ids", "position_ids"):
            port = graph.ports[name]
            graph.ports[name] = replace(port, shape=(everything, *port.shape[1:]))
        graph.sizes = {**graph.sizes, "B": everything}
        return Changes(1, f"{self.rows} rows, and {self.prompt_rows} of a prompt")


@dataclass(frozen=True)
class MixedInputs(Pass):
    """The target reads what a verify step reads, and the prompt's rows; logits are those of the verify step's rows.

    The prompt's last token is left to its first decode step, which chooses the token after it.
    """

    draft_len: int

    name: ClassVar[str] = "mixed_inputs"
    named_values: ClassVar[tuple[str, ...]] = ("input_tokens", "positions")
    looks_for: ClassVar[str] = "the inputs input_ids and position_ids, and an lm_head that reads a hidden state"
    region: ClassVar[PassRegion] = "inputs"
    requires: ClassVar[Facts] = facts("outlined", "prompt_rows", "drafts", "drafts_limited")
    provides: ClassVar[Facts] = facts("target_inputs", "step_logits")
    invalidates: ClassVar[Facts] = facts("logits")

    def run(self, graph: StepGraph) -> Changes:
        width, values, start = self.draft_len + 1, graph.values, graph.anchors.start
        state = [graph.state(name) for name in ("tokens", "length")]
        read, positions = graph.insert(
            newest_and_drafts,
            *state,
            values["slots"],
            values["drafts"],
            before=start,
            width=width,
            vocab_size=graph.layout.vocab_size,
        )
        read, positions = graph.insert(
            with_prompt, read, positions, *state, values["target_slots"], values["prompt_starts"], before=start
        )
        feed_target(graph, read, positions, width)
        hidden = graph.anchors.final_norm
        readers = lm_head_readers(graph)
        rows = int(values["slots"].meta["val"].shape[0])
        judged = graph.insert(first_rows, hidden, before=readers[0], rows=rows)
        for reader in readers:
            reader.replace_input_with(hidden, judged)
        graph.anchors.final_norm = judged
        return Changes(2 + len(readers), f"the target reads {list(read.meta['val'].shape)}, lm_head on {rows} rows")


def mixed_rows(
    slots: torch.Tensor,
    length: torch.Tensor,
    prefill_slot: torch.Tensor,
    prefill_start: torch.Tensor,
    *,
    rows: int,
    prompt_rows: int,
    width: int,
    dummy_slot: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slots ``[rows]`` of the decode rows, slots of all rows, and where each prompt row starts, ``[prompt_rows]``.

    Prompt rows that would start at the prompt's last token or after it are padding, on the dummy slot.

    Args:
        slots: ``[max_batch]``; length: ``[N]``; prefill_slot, prefill_start: ``[1]``.
    """
    starts = prefill_start + width * torch.arange(prompt_rows, device=slots.device)
    reads = starts < length[prefill_slot] - 1
    own = slots[:rows]
    return (
        own,
        torch.cat([own, torch.where(reads, prefill_slot, dummy_slot)]),
        torch.where(reads, starts, 0),
    )


def with_prompt(
    read: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    length: torch.Tensor,
    target_slots: torch.Tensor,
    starts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``read`` and ``positions`` ``[B, T]`` with the prompt's rows after them, ``[B + prompt_rows, T]``.

    A row may reach past the prompt, and past the cache; what it writes there is dead, as of a prompt chunk.
    """
    slots = target_slots[read.shape[0] :]
    prompt_positions = starts[:, None] + torch.arange(read.shape[1], device=tokens.device)
    prompt_positions = prompt_positions.clamp(max=tokens.shape[1] - 1)
    at = torch.minimum(prompt_positions, (length[slots] - 1).clamp(min=0)[:, None])
    prompt_read = tokens[slots[:, None], at]
    return torch.cat([read, prompt_read]), torch.cat([positions, prompt_positions])
