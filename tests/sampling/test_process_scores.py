"""On a CPU the op of all processors runs those that a row uses, and no others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch
from transformers import GenerationConfig

from speccompile import wrap
from speccompile.graph.arena import Arena
from speccompile.graph.state import N, StateSpec, core_state, resolve_layout
from speccompile.sampling.base import Option, Processor, number
from speccompile.sampling.pipeline import PROCESSORS, USED_PROCESSORS, sampling_state
from speccompile.sampling.process_scores import process_scores, state_of_all
from speccompile.sampling.register import register_processor
from speccompile.sampling.request import Sampling, read_sampling
from support.own_processors import processor_registry
from support.tiny import tiny_llama

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
    rows, columns = torch.tensor(slots), arena.layout.tensors[USED_PROCESSORS].columns
    text, length = torch.zeros(len(slots), 8, dtype=torch.int64), torch.ones(len(slots), dtype=torch.int64)
    process_scores(PROCESSORS, torch.zeros(len(slots), 1, VOCAB), text, length, 0, rows, state, columns)
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


class Shift(Processor):
    """Adds a number to the score of token 1."""

    name = "a_shift"
    options: ClassVar = (Option("a_shift", number(0), neutral=0),)
    state: ClassVar = (StateSpec("a_shift", (N,), torch.float32),)

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return {self.state[0].name: float(values["a_shift"])}

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        scores[..., 1] += state[0][:, None]


class OtherShift(Shift):
    state: ClassVar = (StateSpec("a_shift_too", (N,), torch.float32),)


@pytest.fixture
def own_registry() -> Iterator[None]:
    with processor_registry({}):
        yield


@pytest.mark.parametrize(("replacement", "after"), [(Shift, "temperature"), (OtherShift, "top_k")])
def test_a_wrap_keeps_its_columns_whatever_is_registered_later(
    replacement: type[Shift], after: str, own_registry: None
) -> None:
    """Its name comes before all others, and another state of the same name is not that of the wrap."""
    register_processor(Shift(), after="top_k")
    sizes: dict[str, Any] = {"tiers": (0, 2), "max_len": 40, "backend": "eager"}
    with wrap(tiny_llama(), "ngram", **sizes) as spec:

        def text() -> list[int]:
            options = {"repetition_penalty": 1.5, "do_sample": True, "seed": 3, "top_k": 5}
            return spec.engine.submit([5, 6, 7, 6, 7], max_new_tokens=20, eos_token_id=[], **options).result().token_ids

        before = text()
        register_processor(replacement(), after=after, replace=True)
        assert text() == before
