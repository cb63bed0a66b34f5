"""``rejection`` on a tree whose siblings were drawn without replacement: the children of a node are judged in turn.

Miao et al., "SpecInfer" (2023, arXiv 2305.09781), algorithm 2, multi-step speculative sampling, for siblings that are
drawn with replacement. Jeon et al., "Recursive Speculative Decoding" (2024, arXiv 2402.14160), section 3.2, for those
that are drawn without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import Tree
from speccompile.ops.noise import COINS, RESIDUAL, bits, gumbel, keys, uniform
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.draft_chain import append_token, text_so_far
from speccompile.passes.step.sample import probabilities, process
from speccompile.passes.step.tree_accept import TreeExactAccept, as_columns, at_the_root, logits_of


@dataclass(frozen=True)
class TreeCoinAccept(Pass):
    """Walk from the root to the child that :func:`judge_siblings` accepts, and draw from the residual where it accepts
    none. Only nodes on the path are judged, as in
    :class:`~speccompile.passes.step.tree_accept.TreeExactAccept`, whose values this pass names.

    ``draft_probs`` ``[B, nodes, V]`` has for each node the distribution that it and its siblings were drawn from. A
    step without them has drafts of probability 1. There the rule is ``exact``: a child is accepted with the probability
    that the target draws it.
    """

    tree: Tree

    name: ClassVar[str] = "tree_coin_accept"
    named_values: ClassVar[tuple[str, ...]] = ("target_tokens", "row_accepted", "path")
    looks_for: ClassVar[str] = "logits and a tree of drafts"
    region: ClassVar[PassRegion] = "choose"
    requires: ClassVar[Facts] = facts("step_logits", "drafts", "tree")
    provides: ClassVar[Facts] = facts("accepted", "path", "path_scores")

    def run(self, graph: StepGraph) -> Changes:
        values, depth, branches = graph.values, self.tree.depth, most_children(self.tree)
        if "draft_probs" not in values:
            return TreeExactAccept(self.tree).run(graph)
        before: fx.Node = graph.output
        slots = values["slots"]
        context, start = graph.insert(text_so_far, graph.state("tokens"), graph.state("length"), slots)
        noise = (start, slots, graph.state("temperature"), graph.state("seed"))
        drafted = [values[name] for name in ("draft_probs", "drafts", "parents")]
        now, walks, accepted = graph.insert(at_the_root, slots)
        tokens, path, length = [], [now], start
        for level in range(depth + 1):
            logits = graph.insert(logits_of, values["logits"], now)
            # Processors on the host are called once for each token; a row that has some has no drafts.
            scores = process(graph, logits, context, length, before, drafted=level, calls_host=level == 0)
            graph.name_value(f"path_scores_{level}", scores)
            if level == depth:
                tokens.append(graph.insert(draw_after_leaf, scores, *noise, level=level))
                break
            given = (scores, *noise, *drafted, now, walks, accepted)
            token, now, walks, accepted = graph.insert(judge_children, *given, level=level, branches=branches)
            tokens.append(token)
            path.append(now)
            context, length = graph.insert(append_token, context, length, token)
        graph.name_value("target_tokens", graph.insert(as_columns, *tokens))
        graph.name_value("path", graph.insert(as_columns, *path))
        graph.name_value("row_accepted", accepted)
        return Changes(1, f"a path of up to {depth} drafts judged")


def most_children(tree: Tree) -> int:
    """The largest number of children of a node."""
    if tree.parents is None:
        return tree.branches
    return max(tree.parents.count(parent) for parent in tree.parents)


def judge_siblings(
    probs: torch.Tensor, mass: torch.Tensor, siblings: torch.Tensor, coins: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept the first child x whose coin u has u q(x) < p(x). After a rejection p is max(p - q, 0), normalised, and q
    is q without x, normalised.

    A child that q could not draw counts as certain: q is 1 there. Such are the siblings of the likeliest token of a
    greedy row, and drafts of a lookup.

    Args:
        probs: p, ``[B, V]``; mass: q, ``[B, V]``.
        siblings: ``[B, C]``, in the order in which they were drawn, -1 for none; coins: ``[B, C]``.

    Returns:
        The index of the accepted child ``[B]``, -1 for none; and the mass (not normalised) that the target's own token
            is drawn from if none is accepted, ``[B, V]``.
    """
    chosen = torch.full_like(siblings[:, 0], -1)
    left, mass = probs, mass.nan_to_num(0.0)
    for place in range(siblings.shape[1]):
        token = siblings[:, place]
        offered = (token >= 0) & (token < probs.shape[-1]) & (chosen < 0)
        ids = token.clamp(0, probs.shape[-1] - 1)[:, None]
        one = torch.zeros_like(mass).scatter(1, ids, 1.0)
        q = torch.where(mass.gather(1, ids) > 0, mass / mass.sum(-1, keepdim=True), one)
        p = left / left.sum(-1, keepdim=True)
        # Strictly less: a draft with p = 0 is never accepted.
        passes = offered & (coins[:, place] * q.gather(1, ids)[:, 0] < p.gather(1, ids)[:, 0])
        chosen = torch.where(passes, place, chosen)
        rest = (p - q).clamp(min=0)
        # If p and q are equal up to rounding, nothing is left. Drawing from p is then equivalent.
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)
        left = torch.where((offered & ~passes)[:, None], rest, left)
        mass = torch.where(offered[:, None], mass * (1 - one), mass)
    return chosen, left


def judge_children(
    scores: torch.Tensor,
    start: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    draft_probs: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    now: torch.Tensor,
    walks: torch.Tensor,
    accepted: torch.Tensor,
    *,
    level: int,
    branches: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The token after the node ``now`` ``[B]``, ``[B, 1]``; the node that has it, or ``now``; whether one has it; and
    the number of accepted drafts ``[B]``.

    Args:
        scores: ``[B, 1, V]``; start: ``[B]``, committed tokens when the step began; slots: ``[B]``.
        temperature, seed: ``[N]``; draft_probs: ``[B, nodes, V]``; drafts: ``[B, nodes]``; parents: ``[B, 1 +
            nodes]``.
        walks: bool ``[B]``, whether the path has not ended; accepted: ``[B]``.
        level: the depth of ``now``; branches: the largest number of its children.
    """
    probs = probabilities(scores, temperature[slots])[:, 0]
    nodes, siblings = children_of(drafts, parents, now, walks, branches)
    rows = torch.arange(len(slots), device=slots.device)
    mass = draft_probs[rows, (nodes[:, 0] - 1).clamp(min=0)].to(probs.dtype)
    flips = uniform(bits(keys(seed[slots], COINS, (start + level)[:, None], start), branches))[:, 0]
    chosen, left = judge_siblings(probs, mass, siblings, flips)
    found, place = chosen >= 0, chosen.clamp(min=0)[:, None]
    drawn = drawn_from(left, start, seed[slots], level)
    token = torch.where(found, siblings.gather(1, place)[:, 0], drawn)[:, None]
    return token, torch.where(found, nodes.gather(1, place)[:, 0], now), found, accepted + found


def children_of(
    drafts: torch.Tensor, parents: torch.Tensor, now: torch.Tensor, walks: torch.Tensor, branches: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The children of ``now`` ``[B]`` that are drafts, the first in number first: nodes and tokens ``[B, branches]``, 0
    and -1 after the last; none where ``walks`` is False."""
    own = (parents[:, 1:] == now[:, None]) & (drafts >= 0) & walks[:, None]
    ranks = torch.arange(1, branches + 1, device=drafts.device)
    fits = own[:, None] & (own.long().cumsum(1)[:, None] == ranks[:, None])
    found, index = fits.any(-1), fits.long().argmax(-1)
    return torch.where(found, index + 1, 0), torch.where(found, drafts.gather(1, index), -1)


def draw_after_leaf(
    scores: torch.Tensor,
    start: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    *,
    level: int,
) -> torch.Tensor:
    """The token ``[B, 1]`` after a node at the depth of the tree. Arguments: see :func:`judge_children`."""
    probs = probabilities(scores, temperature[slots])[:, 0]
    return drawn_from(probs, start, seed[slots], level)[:, None]


def drawn_from(left: torch.Tensor, start: torch.Tensor, seed: torch.Tensor, level: int) -> torch.Tensor:
    """A token ``[B]`` of the mass ``left`` ``[B, V]``, -1 where it has a NaN; start, seed: ``[B]``."""
    noise = gumbel(seed, RESIDUAL, (start + level)[:, None], left.shape[-1], start)[:, 0]
    return torch.where(left.isnan().any(-1), -1, (left.log() + noise).argmax(-1))
