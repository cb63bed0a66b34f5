"""The op of consecutive processors of the sampling pipeline. On a CPU it runs only those that a row uses."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from speccompile.sampling.base import IMPLEMENTATIONS, Processor, library
from speccompile.utils.devices import traits_of

library.define(
    "process_scores_(Tensor(a!) scores, Tensor context, Tensor length, int drafted, str[] names, int[] counts, "
    "Tensor[] state) -> ()"
)


def state_of(processor: Processor) -> list[str]:
    """Names of the state tensors that a processor reads."""
    return [*(spec.name for spec in processor.state), *processor.reads]


def process_scores(
    processors: Sequence[Processor],
    scores: torch.Tensor,
    context: torch.Tensor,
    length: torch.Tensor,
    drafted: int,
    rows: Mapping[str, torch.Tensor],
) -> None:
    """Apply ``processors`` to ``scores`` ``[B, T, V]`` in place, one after the other, by one op.

    Args:
        drafted: how many of the ``length`` tokens are drafts.
        rows: state of the rows ``[B, ...]`` by name.
    """
    state = [[rows[name] for name in state_of(processor)] for processor in processors]
    torch.ops.speccompile.process_scores_(
        scores,
        context,
        length,
        drafted,
        [processor.name for processor in processors],
        [len(tensors) for tensors in state],
        [tensor for tensors in state for tensor in tensors],
    )


def run_processors(
    scores: torch.Tensor,
    context: torch.Tensor,
    length: torch.Tensor,
    drafted: int,
    names: Sequence[str],
    counts: Sequence[int],
    state: Sequence[torch.Tensor],
) -> None:
    """The op: run the processors ``names``, whose ``state`` ``[B, ...]`` has ``counts`` tensors each."""
    # On a CPU an op's own dispatch would cost as much as all processors that no row uses.
    in_host_memory = traits_of(scores.device).host_memory
    remaining = iter(state)
    for name, count in zip(names, counts, strict=True):
        processor: Processor = IMPLEMENTATIONS[f"{name}_"]
        run = processor.call if in_host_memory else processor.op
        run(scores, context, length, drafted, list(itertools.islice(remaining, count)))


library.impl("process_scores_", run_processors, "CompositeExplicitAutograd")
torch.library.register_fake("speccompile::process_scores_", lambda *_: None, lib=library)
