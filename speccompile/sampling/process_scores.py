"""The op of consecutive processors of the sampling pipeline. On a CPU it runs only those that a row uses, and reads the
state of no others."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from speccompile.ops.define import define
from speccompile.sampling.base import IMPLEMENTATIONS, Processor
from speccompile.utils.devices import traits_of


def state_of(processor: Processor) -> list[str]:
    """Names of the state tensors that a processor reads."""
    return [*(spec.name for spec in processor.state), *processor.reads]


def process_scores(
    processors: Sequence[Processor],
    scores: torch.Tensor,
    context: torch.Tensor,
    length: torch.Tensor,
    drafted: int,
    slots: torch.Tensor,
    state: Mapping[str, torch.Tensor],
) -> None:
    """Apply ``processors`` to ``scores`` ``[B, T, V]`` in place, one after the other, by one op.

    Args:
        drafted: how many of the ``length`` tokens are drafts.
        slots: ``[B]``; state: ``[N, ...]`` by name.
    """
    # On a GPU one compiled kernel reads the rows of all. A CPU does not need most of them.
    in_host_memory = traits_of(scores.device).host_memory
    rows = state if in_host_memory else {name: tensor[slots] for name, tensor in state.items()}
    given = [[rows[name] for name in state_of(processor)] for processor in processors]
    torch.ops.speccompile.process_scores_(
        scores,
        context,
        length,
        drafted,
        [processor.name for processor in processors],
        [len(tensors) for tensors in given],
        [tensor for tensors in given for tensor in tensors],
        slots if in_host_memory else None,
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
) -> None:
    """The op: run the processors ``names``, whose ``state`` has ``counts`` tensors each: ``[N, ...]``, of which
    ``slots`` ``[B]`` are those of the rows, or ``[B, ...]`` without ``slots``."""
    remaining = iter(state)
    for name, count in zip(names, counts, strict=True):
        processor: Processor = IMPLEMENTATIONS[f"{name}_"]
        own = list(itertools.islice(remaining, count))
        if slots is None:
            processor.op(scores, context, length, drafted, own)
            continue
        # Most processors have nothing to do. An op's dispatch would cost more than these questions.
        if _is_unused(processor, own):
            continue
        rows = [tensor.index_select(0, slots) for tensor in own[: processor.deciding]]
        if processor.active(*rows):
            rows += [tensor.index_select(0, slots) for tensor in own[processor.deciding :]]
            processor.call(scores, context, length, drafted, rows)


def _is_unused(processor: Processor, state: Sequence[torch.Tensor]) -> bool:
    """Whether no slot uses the processor, by numpy, whose calls cost a fraction of torch's."""
    specs = processor.state[: processor.deciding]
    if not specs or any(spec.dtype is torch.bfloat16 for spec in specs):
        return False
    return all(bool((tensor.numpy() == spec.fill).all()) for spec, tensor in zip(specs, state, strict=False))


define(
    "process_scores_(Tensor(a!) scores, Tensor context, Tensor length, int drafted, str[] names, int[] counts, "
    "Tensor[] state, Tensor? slots) -> ()",
    None,
    run_processors,
)
