"""What the choice of a step's tokens costs on CUDA, from logits to tokens: launches, and bytes moved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from speccompile.graph.state import B, E, K, N, S, V, core_state
from speccompile.passes.step.drawn_accept import drawn_accept
from speccompile.passes.step.greedy_accept import greedy_accept
from speccompile.passes.step.sample import exact_accept, processed, text_and_drafts
from speccompile.sampling.pipeline import PROCESSORS, sampling_state
from speccompile.sampling.process_scores import state_of_all
from support.cuda_launches import Launches, launches_on_cuda

VOCAB = 128256
COLUMNS = tuple(processor.name for processor in PROCESSORS)


class Step:
    """Its meta tensors; logits are bfloat16 ``[B, T, V]``."""

    def __init__(self, rows: int, width: int) -> None:
        sizes = {N: rows + 1, S: 2056, K: width - 1, B: rows, E: 8, V: VOCAB}
        self.state = {
            spec.name: torch.empty(spec.resolve(sizes).shape, dtype=spec.dtype, device="meta")
            for spec in [*core_state(VOCAB), *sampling_state()]
        }
        self.logits = torch.empty(rows, width, VOCAB, dtype=torch.bfloat16, device="meta")
        self.drafts = torch.empty(rows, width - 1, dtype=torch.int64, device="meta")
        self.lens, self.slots = torch.empty(2, rows, dtype=torch.int64, device="meta")

    def of(self, *names: str) -> list[torch.Tensor]:
        return [self.state[name] for name in names]

    def greedy(self) -> None:
        greedy_accept(self.logits, self.drafts, self.lens)

    def drawn(self) -> None:
        state = self.of("length", "temperature", "seed", "top_k", "top_p", "min_p")
        drawn_accept(self.logits, self.drafts, self.lens, self.slots, *state)

    def sampled(self) -> None:
        names = state_of_all(PROCESSORS)
        context, length = text_and_drafts(*self.of("tokens", "length"), self.slots, self.drafts)
        scores = processed(self.logits, context, length, self.slots, *self.of(*names), names=names, columns=COLUMNS)
        exact_accept(scores, self.drafts, self.lens, self.slots, *self.of("length", "temperature", "seed"))


def counted(kind: Callable[[Step], None], rows: int, *, filters: bool = False) -> Launches:
    step = Step(rows, 8)
    return launches_on_cuda(lambda: kind(step), filters=filters)


@pytest.mark.parametrize("rows", [1, 32])
def test_filters_are_four_launches_and_three_readings(rows: int) -> None:
    greedy = counted(Step.greedy, rows)
    temperature, filtered = counted(Step.drawn, rows), counted(Step.drawn, rows, filters=True)
    assert temperature.names == filtered.names
    assert filtered.names.total() - greedy.names.total() == 4
    logits = rows * 8 * VOCAB * 2
    assert all(item.bytes // logits == 1 for item in (greedy, temperature)) and filtered.bytes // logits == 4


@pytest.mark.parametrize("rows", [1, 32])
def test_processors_that_no_row_uses_move_nothing(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # What calls the host does nothing in a capture.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    sampled = counted(Step.sampled, rows)
    assert not {"aten::sort", "aten::topk", "aten::cumsum", "aten::_log_softmax"} & sampled.names.keys()
    assert sampled.names.total() <= 90
    # The logits and their float32 form, written and read; what lists, masks and sequences of the rows have beside.
    logits = rows * 8 * VOCAB * 2
    assert sampled.bytes < 6 * logits
