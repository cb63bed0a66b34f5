"""On a CPU the op of all processors runs those that a row uses, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from speccompile.graph.arena import Arena
from speccompile.graph.state import N, StateSpec, core_state, resolve_layout
from speccompile.sampling import pipeline
from speccompile.sampling.base import Processor
from speccompile.sampling.pipeline import PROCESSORS, USED_PROCESSORS, processor_columns, sampling_state
from speccompile.sampling.process_scores import process_scores, state_of_all
from speccompile.sampling.request import Sampling, read_sampling

VOCAB = 7


def arena_of(rows: int) -> Arena:
    specs = [*core_state(VOCAB), *sampling_state()]
    sizes = {"max_batch": rows, "max_len": 8, "max_draft_len": 0, "max_width": 1, "vocab_size": VOCAB}
    return Arena(resolve_layout(specs, **sizes), torch.device("cpu"))


def read(**options: Any) -> Sampling:
    read = read_sampling(
        "submit",
        options,
        do_sample=True,
        seed=0,
        config=GenerationConfig(),
        eos=[0],
        vocab_size=VOCAB,
        num_logits=VOCAB,
    )
    assert read is not None
    return read


def called(arena: Arena, slots: list[int], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    for processor in PROCESSORS:
        monkeypatch.setattr(processor, "call", lambda *_, name=processor.name: names.append(name))
    state = {name: arena[name] for name in state_of_all(PROCESSORS)}
    rows = torch.tensor(slots)
    text, length = torch.zeros(len(slots), 8, dtype=torch.int64), torch.ones(len(slots), dtype=torch.int64)
    process_scores(PROCESSORS, torch.zeros(len(slots), 1, VOCAB), text, length, 0, rows, state)
    return names


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([2], []),
        ([0], ["top_k"]),
        ([1], ["repetition_penalty", "temperature", "top_k"]),
        ([2, 0, 1], ["repetition_penalty", "temperature", "top_k"]),
    ],
)
def test_processors_that_no_row_uses_do_not_run(
    slots: list[int], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = arena_of(3)
    # top_k has a default. A temperature of 1 changes nothing.
    read().place(arena, 0, 1)
    read(repetition_penalty=1.5, temperature=0.5).place(arena, 1, 1)
    assert called(arena, slots, monkeypatch) == expected


def test_a_processor_keeps_its_column_where_another_order_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    def register(name: str, after: str) -> None:
        state = (StateSpec("own_state", (N,), torch.int64),)
        own = type("Own", (Processor,), {"name": name, "options": (), "state": state})
        own.__abstractmethods__ = frozenset()
        monkeypatch.setitem(pipeline.REGISTERED, after, [own()])

    register("own", "top_k")
    state = arena_of(1).layout.tensors
    before = processor_columns(state)
    monkeypatch.setattr(pipeline, "REGISTERED", {})
    register("own", "temperature")
    assert processor_columns(state) == before and len(before) == arena_of(1)[USED_PROCESSORS].shape[1]
