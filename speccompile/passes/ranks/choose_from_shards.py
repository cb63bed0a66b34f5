"""Greedy choice without the logits of other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, facts

aten = torch.ops.aten


@dataclass(frozen=True)
class ChooseFromShards(Pass):
    """Each rank chooses among the logits of its part of the vocabulary, and 16 bytes of each rank and place decide.

    It applies where nothing but the choice reads the logits, and they are what the lm_head's parts gave: not where the
    model changes them afterwards (a soft cap), or a drafter reads them. There the logits are gathered.

    Source: ``get_local_max_and_combined`` of TensorRT-LLM's one-model speculation.

    Args:
        rank: this one, which has the logits from ``rank * c`` on, c being their number.
    """

    rank: int

    name: ClassVar[str] = "choose_from_shards"
    looks_for: ClassVar[str] = "a choice among gathered logits"
    optional: ClassVar[bool] = True
    requires: ClassVar[Facts] = facts("step_logits", "accepted")
    provides: ClassVar[Facts] = facts("chosen_from_shards")

    def run(self, graph: StepGraph) -> Changes:
        gathered = graph.values["logits"]
        if gathered.target is not torch.ops.speccompile.all_gather.default:
            return Changes(0, "the model changes the gathered logits")
        choices, others = _choices(gathered)
        if others or not choices:
            return Changes(0, f"the gathered logits are also read by {', '.join(sorted(others)) or 'nothing'}")
        local, size, group, ranks = gathered.args
        assert isinstance(local, fx.Node) and isinstance(ranks, int)
        options = {"size": size, "group": group, "ranks": ranks, "rank": self.rank}
        for choice, places in choices.items():
            (chosen,) = graph.insert(choose_from_part, local, before=choice, places=places, **options)
            names = [name for name, node in graph.values.items() if node is choice]
            choice.replace_all_uses_with(chosen)
            places_read = choice.args[0]
            graph.graph.erase_node(choice)
            if places_read is not gathered and not places_read.users:  # type: ignore[union-attr]
                graph.graph.erase_node(places_read)  # type: ignore[arg-type]
            for name in names:
                graph.name_value(name, chosen)
        graph.values["logits"] = local
        graph.anchors = graph.anchors.mapped(lambda node: local if node is gathered else node)
        gathered.replace_all_uses_with(local)
        graph.graph.erase_node(gathered)
        return Changes(len(choices), f"{16 * ranks} bytes a place instead of the logits")


def _choices(logits: fx.Node) -> tuple[dict[fx.Node, int | None], set[str]]:
    """Greedy choices among ``logits``, each with the number of places that it reads (None: all), and the names of other
    readers. The step's output is none: the commit leaves a step without one."""
    found: dict[fx.Node, int | None] = {}
    others: set[str] = set()
    for user in logits.users:
        if _is_greedy(user):
            found[user] = None
        elif user.target is aten.alias.default or _begins_at_first_place(user):
            places = None if user.target is aten.alias.default else user.args[3]
            assert places is None or isinstance(places, int)
            found |= {reader: places for reader in user.users if _is_greedy(reader)}
            others |= {reader.name for reader in user.users if not _is_greedy(reader)}
        elif user.op != "output":
            others.add(user.name)
    return found, others


def _begins_at_first_place(node: fx.Node) -> bool:
    return node.target is aten.slice.Tensor and node.args[1:3] == (1, 0) and len(node.args) == 4


def _is_greedy(node: fx.Node) -> bool:
    return node.target is torch.ops.speccompile.choose.default and len(node.args) == 1 and not node.kwargs


def choose_from_part(
    logits: torch.Tensor, *, places: int | None, size: int, group: str, ranks: int, rank: int
) -> tuple[torch.Tensor]:
    """The first of the greatest logits of all ranks, int64 ``[B, T]``; -1 where one of them is NaN.

    Args:
        logits: ``[B, T, c]``, this rank's; what is beyond ``size`` in the last rank's is padding.
    """
    logits = logits if places is None else logits[:, :places]
    count = logits.shape[-1]
    if (rank + 1) * count > size:
        beyond = torch.arange(count, device=logits.device) >= size - rank * count
        logits = logits.masked_fill(beyond, float("-inf"))
    own = torch.ops.speccompile.choose(logits)
    best = logits.gather(-1, own.clamp(min=0)[..., None])[..., 0].float()
    # As integers, so that one tensor holds both.
    pair = torch.stack([best.view(torch.int32).long(), torch.where(own < 0, -1, own + rank * count)], -1)
    pairs = torch.ops.speccompile.all_gather(pair, 2 * ranks, group, ranks)
    values, tokens = pairs[..., 0::2].int().view(torch.float32), pairs[..., 1::2]
    chosen = tokens.gather(-1, values.argmax(-1, keepdim=True))[..., 0]
    return (torch.where((tokens < 0).any(-1), -1, chosen),)
