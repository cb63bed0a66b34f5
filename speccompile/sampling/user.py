"""The user's own logits processors, as transformers calls them, inside the step's graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from speccompile.graph.step_graph import TracedProcessor
from speccompile.sampling.base import context_lengths
from speccompile.utils.build_lock import one_build
from speccompile.utils.numbers import is_int
from speccompile.utils.torch_logs import without_log
from speccompile.utils.torch_private import FAKE_TENSOR_LOG, FakeTensorMode
from speccompile.utils.tracer_isolation import traced_alone

#: ``processor(input_ids [R, P] int64, scores [R, V] float32) -> scores [R, V]``, such as a transformers
#: ``LogitsProcessor``.
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class UserProcessor:
    """A processor that :func:`speccompile.sampling.user_check.check_processors` has accepted.

    Args:
        name: the name of its class or function.
        original: the object that was given to ``wrap``.
        function: its ops, ``(input_ids [R, P], scores [R, V], *held) -> scores [R, V]``, for any R and P; it may write
            into ``scores``.
        held: the tensors that it holds, not copies of them.
        least: tokens that a sequence must have before the processor can be called.
    """

    name: str
    original: Processor
    function: Callable[..., torch.Tensor] = field(repr=False)
    held: tuple[torch.Tensor, ...] = field(default=(), repr=False)
    least: int = 1


def apply_processors(
    processors: Sequence[TracedProcessor],
    scores: torch.Tensor,
    context: torch.Tensor,
    length: torch.Tensor,
    held: Sequence[torch.Tensor],
) -> None:
    """Change ``scores`` ``[B, T, V]`` in place by all processors, in order.

    Args:
        context, length: as for :meth:`speccompile.sampling.base.Processor.apply`.
        held: the tensors that the processors hold, in order.
    """
    input_ids = texts_in_front(context, context_lengths(scores, length))
    remaining = iter(held)
    for processor in processors:
        own = [next(remaining) for _ in processor.held]
        result = processor.function(input_ids, scores.flatten(0, 1), *own)
        scores.copy_(result.reshape(scores.shape))


def texts_in_front(context: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The tokens before each position as a separate row, ``[B * T, S]``, with the last token in the last column.

    Columns before the first token repeat it, so every token of the row occurs in the sequence.

    Args:
        context: ``[B, S]``; ends: ``[B, T]``, the number of tokens before each position.
    """
    rows, size = context.shape
    columns = torch.arange(size, device=context.device)
    source = (columns - (size - ends[..., None])).clamp(min=0)
    # After a row's own drafts there is -1, which is not an index. Tokens chosen there are not used.
    return context.gather(1, source.view(rows, -1)).view(-1, size).clamp(min=0)


@dataclass(frozen=True)
class ProcessorTrace:
    """The traced ops of a processor, and numbers that its behaviour may depend on.

    Args:
        function, held: as in :class:`UserProcessor`.
        lengths: numbers that it compares the sequence's length with.
        tokens: numbers in its ops and in the integer tensors it holds: ids that it may search for.
        sequences: the integer tensors that it holds; their last dimension is a sequence.
    """

    function: Callable[..., torch.Tensor]
    held: tuple[torch.Tensor, ...]
    lengths: frozenset[int]
    tokens: frozenset[int]
    sequences: tuple[torch.Tensor, ...]


def trace(processor: Processor, input_ids: torch.Tensor, scores: torch.Tensor) -> ProcessorTrace:
    """Trace ``processor`` over fakes of ``input_ids`` ``[R, P]`` and ``scores`` ``[R, V]``, R and P symbolic.

    A branch on P is traced as for the given P.

    Raises:
        DataDependentOutputException, DynamicOutputShapeException: it reads values in Python.
        Exception: any other error that it raises over fakes.
    """
    sizes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes)
    dims = [DimDynamic.DUCK, DimDynamic.DUCK], [DimDynamic.DUCK, DimDynamic.STATIC]
    fakes = [
        mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))
        for tensor, dynamic in zip((input_ids, scores), dims, strict=True)
    ]
    with one_build(), traced_alone(), without_log(FAKE_TENSOR_LOG), mode, torch.no_grad():
        traced = make_fx(processor)(*fakes)
    held = tuple(tensor.to(scores.device) for tensor in _held_as_inputs(traced))
    numbers = {item for node in traced.graph.nodes for item in _numbers(node)}
    sequences = tuple(tensor for tensor in held if tensor.dtype in (torch.int32, torch.int64))
    for tensor in sequences:
        numbers.update(tensor.unique().tolist())
    return ProcessorTrace(
        traced,
        held,
        frozenset(int(number) for guard in sizes.guards for number in guard.expr.atoms() if number.is_Integer),
        frozenset(number for number in numbers if 0 <= number < scores.shape[1]),
        sequences,
    )


def _held_as_inputs(traced: fx.GraphModule) -> tuple[torch.Tensor, ...]:
    """Turn tensors that the code holds into further inputs, and return them."""
    graph = traced.graph
    graph.eliminate_dead_code()
    last = graph.find_nodes(op="placeholder")[-1]
    inputs: dict[Any, fx.Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        if node.target not in inputs:
            with graph.inserting_after(last):
                last = inputs[node.target] = graph.placeholder(f"held_{len(inputs)}")
        node.replace_all_uses_with(inputs[node.target])
        graph.erase_node(node)
    traced.recompile()
    return tuple(getattr(traced, str(target)).detach() for target in inputs)


def _numbers(node: fx.Node) -> list[int]:
    flat: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), flat.append)
    return [item for item in flat if is_int(item)]
