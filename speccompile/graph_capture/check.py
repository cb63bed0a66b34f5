"""The capture check: a step graph has to compute what the model computes, or it is refused."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from speccompile.errors import CaptureMismatch, LoweringError
from speccompile.graph_capture.graph import StepGraph
from speccompile.graph_capture.support import ModelInfo
from speccompile.runtime.arena import Arena

# Share of the largest logit by which two correct forwards of one model may differ.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}

TEXT_LENGTH = 48
PIECES = (19, 1, 5, 23)

Run = Callable[..., torch.Tensor]


def check_capture(
    model: PreTrainedModel, info: ModelInfo, graph: StepGraph, arena: Arena, lowered: Run, reference: Run
) -> float:
    """Compare logits on random text, fed in pieces of different width, two ragged rows at a time.

    Args:
        graph: captured, with the inputs ``input_ids``, ``position_ids``, ``row_slots``.
        lowered: the graph as the backend lowers it; ``reference``: as the eager backend does. Both return logits.

    Returns:
        The largest difference seen.

    Raises:
        CaptureMismatch: the graph itself is wrong.
        LoweringError: the graph is right and the backend's version of it is not.
    """
    text_length = min(TEXT_LENGTH, arena.layout.max_len)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(info.vocab_size, (2, text_length), generator=generator).to(info.device)
    with torch.no_grad():
        expected = torch.cat([model(input_ids=row[None], use_cache=False).logits for row in text])
    allowed = TOLERANCE[info.dtype] * float(expected.abs().max())
    difference, where = _largest_difference(graph, arena, text, expected, lowered)
    if difference <= allowed:
        return difference
    captured, captured_where = _largest_difference(graph, arena, text, expected, reference)
    if captured <= allowed:
        raise LoweringError(
            f"the compiled graph differs from the captured one by {difference:.3g} (allowed {allowed:.3g}) {where}; "
            "use backend='eager'"
        )
    raise CaptureMismatch(model=info.name, difference=captured, allowed=allowed, where=captured_where)


def _largest_difference(
    graph: StepGraph, arena: Arena, text: torch.Tensor, expected: torch.Tensor, run: Run
) -> tuple[float, str]:
    # The second row runs behind the first by a piece, so that rows stand at different positions; the dummy slot
    # lends it a place, since it belongs to nobody.
    slots = torch.tensor([0, arena.layout.dummy_slot], device=text.device)
    arguments = {
        node.name: graph.ports[node.name].value if graph.ports[node.name].role == "weight" else arena[node.name]
        for node in graph.placeholders
        if graph.ports[node.name].role != "input"
    }
    starts = [0, 0]
    worst, where = 0.0, ""
    for number, width in enumerate((*PIECES, *PIECES[::-1])):
        rows = [0] if number == 0 else [0, 1]
        for row in rows:
            starts[row] = min(starts[row], text.shape[1] - width) if width <= text.shape[1] else 0
        width = min(width, text.shape[1])
        positions = torch.stack([torch.arange(start, start + width) for start in starts]).to(text.device)[rows]
        arguments["input_ids"] = text[rows].gather(1, positions)
        arguments["position_ids"] = positions
        arguments["row_slots"] = slots[rows]
        with torch.no_grad():
            logits = run(*[arguments[node.name] for node in graph.placeholders])[0]
        for row in rows:
            wanted = expected[row, starts[row] : starts[row] + width]
            difference = float((logits[row] - wanted).abs().max()) if logits.isfinite().all() else float("inf")
            if difference > worst:
                worst, where = difference, f"in tokens {starts[row]} to {starts[row] + width - 1}"
            starts[row] += width
    return worst, where
