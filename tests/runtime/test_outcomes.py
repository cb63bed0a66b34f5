"""What runs return to the host: the right columns, of the right run, in a buffer that no other run writes to."""

from __future__ import annotations

import pytest
import torch

from speccompile.graph.state import K, N, StateSpec
from speccompile.modes.base import DRAFT_SOURCE
from speccompile.modes.ready_mode import proposal_state
from speccompile.passes.step.judge_chain import tree_outcome_state
from speccompile.runtime.outcomes import Columns, HostBuffer, Outcome, Outcomes, pack
from speccompile.runtime.proposal import NO_PROPOSAL, Proposal
from support.engine_parts import small_arena
from support.engines import Bench, Make, prompt
from support.tiny import greedy


def test_packed_columns_are_those_of_the_arena(bench: Bench, make: Make) -> None:
    engine = make().engine
    arena, width = engine.arena, bench.build.arena.layout.max_width
    requests = [engine.submit(prompt(7, seed), max_new_tokens=20) for seed in range(2)]
    seen = 0
    for _ in range(5):
        engine.step()
        packed = pack(arena)
        assert packed.dtype == torch.int64 and packed.shape == (4 + width, arena.layout.max_batch + 1)
        for slot, row in enumerate(packed.T.tolist()):
            assert row[:3] == [int(arena[name][slot]) for name in ("emitted", "accepted", "proposed")]
            assert row[3] == arena["alive"][slot]
        for request in requests:
            if request.finished or request.slot < 0:
                continue
            emitted, _, _, _, *newest = packed[:, request.slot].tolist()
            length = int(arena["length"][request.slot])
            text = request.prompt + greedy(bench.model, request.prompt, 20)
            assert newest[:emitted] == text[length - emitted : length]
            seen += emitted
    assert seen > 6
    engine.run()


def test_a_text_at_max_len_is_packed_in_bounds(bench: Bench, make: Make) -> None:
    arena = bench.build.arena
    engine = make().engine
    request = engine.submit(prompt(arena.layout.max_len - 2), max_new_tokens=50)
    engine.run()
    assert len(request.new_tokens) == 2 and request.finish_reason == "max_len"
    arena["length"][0] = arena.layout.max_len
    try:
        assert pack(arena)[4:, 0].tolist() == arena["tokens"][0, arena.layout.max_len :].tolist()
    finally:
        arena.reset_slot(0)


def test_what_waits_for_the_next_step_is_packed_and_read_exactly() -> None:
    tree = StateSpec("tree_count", (N,), torch.int64)
    scores, source = StateSpec("draft_score", (N, K), torch.float32), StateSpec(DRAFT_SOURCE, (N,), torch.int64)
    arena = small_arena(*tree_outcome_state(), *proposal_state(), tree, scores, source)
    drawn = torch.rand(arena["draft_score"].shape, generator=torch.Generator().manual_seed(0))
    arena["draft_score"].copy_(drawn)
    arena["deepest_draft"].fill_(9)
    for name, values in {"draft_lens": [3, 0, 1], "tree_count": [0, 2, 1], DRAFT_SOURCE: [1, 0, 2]}.items():
        arena[name].copy_(torch.tensor(values))
    of, columns = Columns.of(arena), pack(arena).tolist()
    assert len(columns) == of.count and columns[of.of_tree][2] == [9, 9, 9]
    assert [of.proposal(columns, slot) for slot in range(3)] == [
        Proposal(3, 0, 1, tuple(drawn[0].tolist())),
        Proposal(0, 2, 0),
        Proposal(1, 1, 2, tuple(drawn[2, :1].tolist())),
    ]


def test_without_drafters_nothing_waits() -> None:
    arena = small_arena()
    of = Columns.of(arena)
    assert not of.proposes and of.count == len(pack(arena)) and of.proposal(pack(arena).tolist(), 0) is NO_PROPOSAL


class Late(HostBuffer):
    """Arrives when it is waited for, as a copy from a GPU may."""

    made = 0

    def __init__(self) -> None:
        Late.made += 1
        self.on_the_way: list[list[int]] | None = None

    def fill(self, packed: torch.Tensor) -> None:
        assert self.on_the_way is None, "what was there has not been read"
        self.on_the_way = packed.tolist()

    def read(self) -> list[list[int]]:
        assert self.on_the_way is not None
        results, self.on_the_way = self.on_the_way, None
        return results


def test_a_buffer_is_used_again_when_it_has_been_read() -> None:
    Late.made = 0
    values = iter(range(100))
    outcomes = Outcomes(lambda: torch.full((1, 1), next(values)), Late)
    flying: list[Outcome] = []
    read = []
    for _ in range(10):
        flying.append(outcomes.take())
        if len(flying) > 1:
            read.append(flying.pop(0).read()[0][0])
    assert read == list(range(9)) and Late.made == 2
    # One that is never read: its copy may still be on the way.
    flying.clear()
    for _ in range(3):
        read.append(outcomes.take().read()[0][0])
    assert read[-3:] == [10, 11, 12] and Late.made == 2
    outcomes.take()
    assert outcomes.take().read() == [[14]] and Late.made == 3


def test_a_prompt_that_ends_while_a_step_is_in_flight_leaves_its_outcome_alone(
    bench: Bench, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make().engine
    engine.scheduler.late = True
    # Not another Outcomes for the scheduler alone: prompts have to use the same buffers.
    monkeypatch.setattr(engine.scheduler.outcomes, "_create", Late)
    first = engine.submit(prompt(5), max_new_tokens=30)
    while len(first.new_tokens) < 4:
        engine.step()
    assert engine.scheduler.flights
    others = [engine.submit(prompt(5, seed), max_new_tokens=20) for seed in (1, 2)]
    engine.run()
    for request in (first, *others):
        assert request.new_tokens == greedy(bench.model, request.prompt, request.params.max_new_tokens)
