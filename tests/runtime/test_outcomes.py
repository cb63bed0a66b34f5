"""What runs return to the host: the right columns, of the right run, in a buffer that no other run writes to."""

from __future__ import annotations

import pytest
import torch

from speccompile.runtime.outcomes import HostBuffer, Outcome, Outcomes, pack
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
    monkeypatch.setattr(engine.scheduler.outcomes, "_make", Late)
    first = engine.submit(prompt(5), max_new_tokens=30)
    while len(first.new_tokens) < 4:
        engine.step()
    assert engine.scheduler.flights
    others = [engine.submit(prompt(5, seed), max_new_tokens=20) for seed in (1, 2)]
    engine.run()
    for request in (first, *others):
        assert request.new_tokens == greedy(bench.model, request.prompt, request.params.max_new_tokens)
