"""A choice without the logits of other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.ops.noise import TOKENS, gumbel_of
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.ranks.broadcast_choice import gathered_of
from speccompile.passes.step.drawn_accept import divided

aten = torch.ops.aten

#: Ops that may stand between the logits and a choice: each number depends on one logit. Slices: :func:`_is_local`.
POINTWISE = (aten.alias.default, aten._to_copy.default, aten.div.Tensor, aten.mul.Tensor, aten.tanh.default)


@dataclass(frozen=True)
class ChooseFromShards(Pass):
    """Each rank chooses among the logits of its part of the vocabulary, and 16 bytes of each rank and place decide.

    Noise is that of the token's id in the whole vocabulary, so what is drawn is what one process draws. It applies
    where nothing but the choice reads the logits, or numbers that depend on one of them each (a scale, a soft cap, a
    temperature). Elsewhere the logits are gathered.

    Source: ``get_local_max_and_combined`` of TensorRT-LLM's one-model speculation.

    Args:
        rank: this one, which has the logits from ``rank * c`` on, c being their number.
    """

    rank: int

    name: ClassVar[str] = "choose_from_shards"
    looks_for: ClassVar[str] = "a choice among gathered logits"
    region: ClassVar[PassRegion] = "choose"
    optional: ClassVar[bool] = True
    requires: ClassVar[Facts] = facts("step_logits", "accepted")
    provides: ClassVar[Facts] = facts("chosen_from_shards")

    def run(self, graph: StepGraph) -> Changes:
        gathered = gathered_of(graph.values["logits"])
        if gathered is None:
            return Changes(0, "the lm_head is whole on every rank")
        readers = list(_readers(gathered))
        choices = [node for node in readers if _is_choice(node)]
        others = sorted({node.name for node in readers} - {node.name for node in choices})
        if others or not choices:
            return Changes(0, f"the gathered logits are also read by {', '.join(others) or 'nothing'}")
        local, size, group, ranks = gathered.args
        assert isinstance(local, fx.Node) and isinstance(ranks, int)
        graph.replace(gathered, local)
        graph.propagate()
        for choice in choices:
            given = _arguments(choice)
            options = {"size": size, "group": group, "ranks": ranks, "rank": self.rank}
            if choice.target is torch.ops.speccompile.draw_filtered.default:
                names: tuple[str, ...] = ("logits", "slots", "temperature", "length", "seed", "depths")
                function: Callable[..., tuple[torch.Tensor]] = draw_from_part
            else:
                names, function = ("scores", "temperature", "seed", "positions"), choose_from_part
                options["forbids"] = given.get("forbids", False)
            inputs = [given[name] for name in names if given.get(name)]
            (chosen,) = graph.insert(function, *inputs, before=choice, **options)
            graph.replace(choice, chosen)
        return Changes(len(choices), f"{16 * ranks} bytes a place instead of the logits")


def _readers(gathered: fx.Node) -> Iterator[fx.Node]:
    """Nodes that read the logits, or numbers that depend on one logit each. The step's output is not among them: the
    commit leaves a step without one.
    """
    for user in gathered.users:
        if _is_local(user, gathered):
            yield from _readers(user)
        elif user.op != "output":
            yield user


def _is_local(node: fx.Node, logits: fx.Node) -> bool:
    """Whether each number of ``node`` depends on one of ``logits``, and on nothing that differs between tokens."""
    if node.target is aten.slice.Tensor:
        return bool(node.args[1] == 1)
    if node.target not in POINTWISE or node.args[0] is not logits:
        return False
    others = [other.meta["val"].shape for other in node.all_input_nodes if other is not logits]
    return all(not shape or shape[-1] == 1 for shape in others)


def _is_choice(node: fx.Node) -> bool:
    if node.target is torch.ops.speccompile.draw_filtered.default:
        given = _arguments(node)
        return not given.get("divided") and all(given.get(name) is None for name in ("top_k", "top_p", "min_p"))
    if node.target is not torch.ops.speccompile.choose.default:
        return False
    given = _arguments(node)
    return given.get("stream", TOKENS) == TOKENS and given.get("start") is None


def _arguments(choice: fx.Node) -> dict[str, Any]:
    op: Any = choice.target
    names = [argument.name for argument in op._schema.arguments]
    return {**dict(zip(names, choice.args, strict=False)), **choice.kwargs}


def draw_from_part(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    length: torch.Tensor,
    seed: torch.Tensor,
    depths: torch.Tensor | None = None,
    **part: Any,
) -> tuple[torch.Tensor]:
    """Choose tokens, int64 ``[B, T]``, as ``speccompile::draw_filtered`` does without filters among the logits of all
    ranks.

    Args:
        logits: ``[B, T, c]``, this rank's; slots: ``[B]``; temperature, length, seed: ``[N]``.
        depths: ``[B, T]``, or None.
        part: further arguments of :func:`choose_from_part`.
    """
    scores, own, positions = divided(logits, slots, temperature, length, depths)
    return choose_from_part(scores, own, seed[slots], positions, forbids=True, **part)


def choose_from_part(
    scores: torch.Tensor,
    temperature: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    *,
    forbids: bool,
    size: int,
    group: str,
    ranks: int,
    rank: int,
) -> tuple[torch.Tensor]:
    """Choose tokens, int64 ``[B, T]``, as :func:`speccompile.ops.choose.reference` does among the scores of all ranks.

    Args:
        scores: ``[B, T, c]``, this rank's; what is beyond ``size`` in the last rank's is padding.
        temperature: ``[B]``; seed: ``[B]``; positions: ``[B, T]``; of the noise. None: no noise.
    """
    count = scores.shape[-1]
    first = rank * count
    if first + count > size:
        beyond = torch.arange(count, device=scores.device) >= size - first
        scores = scores.masked_fill(beyond, float("-inf"))
    if temperature is None:
        own = torch.ops.speccompile.choose(scores)
    else:
        own = torch.ops.speccompile.choose(scores, temperature, seed, positions, TOKENS, first_id=first)
    token = first + own.clamp(min=0)
    best = scores.gather(-1, own.clamp(min=0)[..., None])[..., 0].float()
    if temperature is not None and seed is not None and positions is not None:
        noise = gumbel_of(seed, TOKENS, positions, token)
        best = best + torch.where(temperature[:, None] > 0, noise, 0.0)
    # As integers: one tensor holds both.
    pair = torch.stack([best.view(torch.int32).long(), torch.where(own < 0, -1, token)], -1)
    pairs = torch.ops.speccompile.all_gather(pair, 2 * ranks, group, ranks)
    values, tokens = pairs[..., 0::2].int().view(torch.float32), pairs[..., 1::2]
    greatest = values.argmax(-1, keepdim=True)
    none = (tokens < 0).any(-1)
    if forbids:
        none = none | (values.gather(-1, greatest)[..., 0] == float("-inf"))
    return (torch.where(none, -1, tokens.gather(-1, greatest)[..., 0]),)
