"""A drafter from outside: its own state, its mistakes, and a wrap that could never use it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile.errors import PassError
from speccompile.graph.state import N, StateSpec
from speccompile.modes import ReadyMode, registry
from support.errors import raises
from support.plans import step_graph
from support.tiny import admitted, tiny_llama


@dataclass(frozen=True)
class Counting(ReadyMode):
    """Counts, in state of its own, how often each slot was asked."""

    name: ClassVar[str] = "counting"
    own_state: ClassVar[tuple[str, ...]] = ("asked",)

    def state(self, tiers: Sequence[int]) -> list[StateSpec]:
        return [*super().state(tiers), StateSpec("asked", (N,), torch.int64, high=9)]

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slots, asked = own_state
        asked.index_put_((slots,), asked[slots] + 1)
        return tokens[:, :draft_len], torch.full_like(length, 1)

    def explain(self) -> str:
        return "counts"


@dataclass(frozen=True)
class Faulty(ReadyMode):
    """Proposes whatever the test says."""

    answer: Callable[..., Any] = lambda tokens, length, draft_len: None

    name: ClassVar[str] = "faulty"

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result: tuple[torch.Tensor, torch.Tensor] = self.answer(tokens, length, draft_len)
        return result

    def explain(self) -> str:
        return "fails"


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaForCausalLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_modes", dict(registry._modes))
        for mode in (Counting, Faulty):
            speccompile.register_mode(mode.name, mode)
        made = tiny_llama()
        # What is captured here, single steps below find.
        speccompile.wrap(made, "none", tiers=(0,), max_len=16, backend="eager")
        yield made


def test_own_state_is_found_by_slot_not_by_row(model: LlamaForCausalLM) -> None:
    spec = speccompile.wrap(model, mode="counting", tiers=(0, 1), max_batch=2, max_len=31, backend="eager")
    engine, asked = spec.engine, spec.arena["asked"]
    first, second = (admitted(engine, [5, 6, 7], max_new_tokens=n) for n in (8, 28))
    assert engine.running == [first, second]
    while not first.finished:
        engine.step()
    # The second request moves up to row 0; its slot, and its count, stay.
    before = asked.tolist()
    engine.step()
    after = asked.tolist()
    assert after[second.slot] == before[second.slot] + 1
    assert after[first.slot] == before[first.slot]


@pytest.mark.parametrize(
    ("answer", "fields"),
    [
        (lambda tokens, length, k: tokens[:, :k], {"returned": "one tensor"}),
        (lambda tokens, length, k: (tokens[:, :k].float(), length), {"returned": "torch.float32[1, 3]"}),
        (lambda tokens, length, k: (tokens[:, :k], length.float()), {"returned": "torch.float32[1]"}),
        (lambda tokens, length, k: (tokens[:, : k + 1], length), {"returned": "torch.int64[1, 4]"}),
        (lambda tokens, length, k: (tokens[:, :k], length[0]), {"returned": "torch.int64[]"}),
        (lambda tokens, length, k: (tokens[:, :k], None), {"returned": "None"}),
        (
            lambda tokens, length, k: (tokens[:, :k] + torch.tensor([1, 2, 3]), length),
            {"reason": re.compile("tensor from Python numbers")},
        ),
        (
            lambda tokens, length, k: (tokens[:, :k], length if length[0] > 5 else length + 1),
            {"reason": re.compile("^DataDependentOutputException")},
        ),
        (lambda tokens, length, k: 1 / 0, {"reason": "ZeroDivisionError: division by zero"}),
    ],
)
def test_a_drafters_mistake_is_explained(
    model: LlamaForCausalLM, answer: Callable[..., Any], fields: dict[str, Any]
) -> None:
    with raises(PassError, **fields):
        step_graph(model, "faulty", 3, "greedy", tiers=(0, 3), max_len=16, backend="eager", answer=answer)


def test_a_mistake_ends_a_wrap(model: LlamaForCausalLM) -> None:
    with raises(PassError, returned="one tensor"):
        speccompile.wrap(
            model, mode="faulty", tiers=(0, 3), max_len=16, backend="eager", answer=lambda tokens, length, k: tokens
        )


def test_only_the_plain_tier_needs_no_drafter(model: LlamaForCausalLM) -> None:
    spec = speccompile.wrap(model, mode="faulty", tiers=(0,), max_len=64, backend="eager")
    prompt = torch.tensor([[3, 4, 5]])
    wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)
    assert torch.equal(spec.generate(prompt, max_new_tokens=20), wanted)
    assert "propose" not in spec.stages
