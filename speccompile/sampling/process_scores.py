"""The op of consecutive processors of the sampling pipeline. On a CPU it runs only those that a row uses."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from speccompile.ops.define import define
from speccompile.sampling.base import IMPLEMENTATIONS, Processor
from speccompile.sampling.pipeline import USED_PROCESSORS
from speccompile.utils.devices import traits_of


def state_of(processor: Processor) -> list[str]:
    """Names of the state tensors that a processor reads."""
    return [*(spec.name for spec in processor.state), *processor.reads]


def state_of_all(processors: Sequence[Processor]) -> tuple[str, ...]:
    """Names of the state tensors of a call of :func:`process_scores`."""
    return tuple(dict.fromkeys([USED_PROCESSORS, *(name for item in processors for name in state_of(item))]))


def process_scores(
    processors: Sequence[Processor],
    scores: torch.Tensor,
    context: torch.Tensor,
    length: torch.Tensor,
    drafted: int,
    slots: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    columns: Sequence[str],
) -> None:
    """Apply ``processors`` to ``scores`` ``[B, T, V]`` in place, one after the other, by one op.

    Args:
        drafted: how many of the ``length`` tokens are drafts.
        slots: ``[B]``; state: all tensors of :func:`state_of_all`, ``[N, ...]``, by name.
        columns: names of the processors of the columns of ``state[USED_PROCESSORS]``.
    """
    # On a GPU one compiled kernel reads the rows of all. A CPU does not need most of them.
    in_host_memory = traits_of(scores.device).host_memory
    given = [[state[name] for name in state_of(processor)] for processor in processors]
    if not in_host_memory:
        given = [[tensor[slots] for tensor in tensors] for tensors in given]
    torch.ops.speccompile.process_scores_(
        scores,
        context,
        length,
        drafted,
        [processor.name for processor in processors],
        [len(tensors) for tensors in given],
        [tensor for tensors in given for tensor in tensors],
        *((slots, state[USED_PROCESSORS]) if in_host_memory else (None, None)),
        [columns.index(processor.name) for processor in processors],
    )


def run_processors(
    scores: torch.Tensor,
    context: torch.Tensor,
    length: torch.Tensor,
    drafted: int,
    names: Sequence[str],
    counts: Sequence[int],
    state: Sequence[torch.Tensor],
    slots: torch.Tensor | None,
    used: torch.Tensor | None,
    columns: Sequence[int],
) -> None:
    """The op: run the processors ``names``, whose ``state`` has ``counts`` tensors each.

    Args:
        state: ``[N, ...]``, of which ``slots`` ``[B]`` are those of the rows; ``[B, ...]`` without ``slots``.
        used: bool ``[N, P]``, whose ``columns`` are those of the processors: whether a slot uses it. None: run all.
    """
    if slots is None or used is None:
        parts = itertools.pairwise(itertools.accumulate(counts, initial=0))
        for name, (start, end) in zip(names, parts, strict=True):
            IMPLEMENTATIONS[f"{name}_"].op(scores, context, length, drafted, state[start:end])
        return
    # By numpy, whose calls cost a fraction of torch's. An op's dispatch would cost more than the processor's own call.
    in_use = used.numpy()[slots.numpy()].any(axis=0).nonzero()[0].tolist()
    for index in sorted(columns.index(column) for column in in_use if column in columns):
        processor: Processor = IMPLEMENTATIONS[f"{names[index]}_"]
        start = sum(counts[:index])
        own = [tensor.index_select(0, slots) for tensor in state[start : start + counts[index]]]
        processor.call(scores, context, length, drafted, own)


define(
    "process_scores_(Tensor(a!) scores, Tensor context, Tensor length, int drafted, str[] names, int[] counts, "
    "Tensor[] state, Tensor? slots, Tensor? used, int[] columns) -> ()",
    None,
    run_processors,
)
