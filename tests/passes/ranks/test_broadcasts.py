"""What ranks take over from the first one, without processes: here every rank is the first one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.ops import collective
from speccompile.passes.ranks.broadcast_choice import gathered_of
from speccompile.passes.ranks.broadcast_proposals import keep_first_ranks

LOCAL, HIDDEN, WEIGHT = torch.zeros(1, 1, 4), torch.zeros(1, 1, 4), torch.zeros(8, 4)


def logits_of(compute: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> fx.Node:
    with collective.alone():
        graph = make_fx(compute)(*inputs).graph
    (found,) = graph.output_node().all_input_nodes
    return found


def test_logits_that_were_gathered_are_known_through_scales_and_caps() -> None:
    def gathered(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.speccompile.all_gather(x, 8, "g", 2)

    assert gathered_of(logits_of(gathered, LOCAL)) is not None
    assert gathered_of(logits_of(lambda x: ((gathered(x) / 30).tanh() * 30)[:, :1].float(), LOCAL)) is not None


def test_logits_of_a_whole_lm_head_are_each_ranks_own() -> None:
    assert gathered_of(logits_of(lambda x, w: torch.nn.functional.linear(x, w), HIDDEN, WEIGHT)) is None
    # A sum over ranks before it makes hidden states equal, and not what the lm_head computes of them.
    summed = torch.ops.speccompile.all_reduce
    assert gathered_of(logits_of(lambda x, w: torch.nn.functional.linear(summed(x, "g", 2), w), HIDDEN, WEIGHT)) is None


def test_proposals_of_the_rows_are_kept_in_their_slots() -> None:
    tokens, counts = torch.arange(12).view(4, 3), torch.arange(4)
    before = tokens.clone(), counts.clone()
    with collective.alone():
        keep_first_ranks(torch.tensor([2, 0]), tokens, counts, group="g", ranks=2)
    assert torch.equal(tokens, before[0]) and torch.equal(counts, before[1])
