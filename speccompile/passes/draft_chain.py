"""Sequential drafting: K forwards of one token a row, each from what the one before it chose."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from speccompile.graph_capture.graph import StepGraph
from speccompile.passes.drafts import set_drafts, useful_lens
from speccompile.passes.sample import draw, probabilities, process, put_tokens

#: Token ``[B, 1]``, its position ``[B, 1]`` and its place in the draft to logits ``[B, 1, V]``.
Forward = Callable[[fx.Node, fx.Node, int], fx.Node]


def draft_chain(
    graph: StepGraph,
    forward: Forward,
    draft_len: int,
    *,
    draws: bool = False,
    with_probabilities: bool = False,
    max_len: int | None = None,
) -> None:
    """Insert ``draft_len`` calls of ``forward`` in front of the target, and make their tokens the step's drafts.

    With ``draws`` logits go through the request's own pipeline, and the target's noise of the place is added: the
    drafter draws what the target would, as far as both agree. With ``with_probabilities`` it draws with noise of its
    own, which does not come back in the next step, and leaves what it drew from, ``draft_probs`` ``[B, K, V]``.

    Args:
        forward: inserts the drafter's ops in front of ``graph.anchors.start``.
        max_len: of the drafter; rows whose drafts would reach it have fewer, or none.
    """
    slots, start = graph.values["slots"], graph.anchors.start
    state = [graph.state(name) for name in ("tokens", "length", "limit")]
    longest = graph.layout.max_len if max_len is None else max_len
    token, position, lens = graph.insert(newest, *state, slots, before=start, draft_len=draft_len, max_len=longest)
    drafted, drawn_from = [], []
    if draws:
        context, length = graph.insert(text_so_far, *state[:2], slots, before=start)
        begun = length
    for place in range(draft_len):
        logits = forward(token, position, place)
        if draws:
            logits = process(graph, logits, context, length, start, drafted=place)
            if with_probabilities:
                nodes = (logits, graph.state("temperature"), slots)
                drawn_from.append(graph.insert(slot_probabilities, *nodes, before=start))
            noise = [graph.state(name) for name in ("temperature", "seed")]
            own = [begun] if with_probabilities else []
            drawn = graph.insert(draw, logits, length, slots, *noise, *own, before=start)
        else:
            drawn = graph.insert(torch.ops.speccompile.choose, logits, before=start)
        token, position = graph.insert(go_on, drawn, position, before=start)
        if draws:
            context, length = graph.insert(lengthened, context, length, token, before=start)
        drafted.append(token)
    if drawn_from:
        graph.name_value("draft_probs", graph.insert(side_by_side, *drawn_from, before=start))
    set_drafts(graph, graph.insert(join, lens, *drafted, before=start), lens)


def newest(
    tokens: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    slots: torch.Tensor,
    *,
    draft_len: int,
    max_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The newest committed token ``[B, 1]``, its position ``[B, 1]``, and the rows' draft lengths ``[B]``."""
    row_length = length[slots]
    position = (row_length - 1).clamp(min=0)
    longest = (max_len - 1 - row_length).clamp(min=0, max=draft_len)
    lens = useful_lens(longest, row_length, limit[slots])
    return tokens[slots, position][:, None], position[:, None], lens


def go_on(drawn: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token ``[B, 1]``, which is any where none could be ``drawn``, and its position."""
    return drawn.clamp(min=0), position + 1


def text_so_far(tokens: torch.Tensor, length: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's text ``[B, S]`` and its length ``[B]``."""
    return tokens[slots], length[slots]


def lengthened(
    context: torch.Tensor, row_length: torch.Tensor, token: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The text with one more token ``[B, 1]``, and its length."""
    return put_tokens(context, row_length, token), row_length + 1


def slot_probabilities(scores: torch.Tensor, temperature: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return probabilities(scores, temperature[slots])


def side_by_side(*places: torch.Tensor) -> torch.Tensor:
    """K of ``[B, 1, V]`` as ``[B, K, V]``."""
    return torch.cat(places, dim=1)


def join(lens: torch.Tensor, *drafted: torch.Tensor) -> torch.Tensor:
    """K tokens ``[B, 1]`` as drafts ``[B, K]``, -1 behind a row's own draft length."""
    offsets = torch.arange(len(drafted), device=lens.device)
    return torch.where(offsets < lens[:, None], torch.cat(drafted, dim=1), -1)
