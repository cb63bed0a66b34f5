"""Which of several prompts is read next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from speccompile.graph.arena import Arena
from speccompile.runtime.reading_order import ReadingOrder
from speccompile.runtime.request import Request
from speccompile.runtime.slots import Slots
from support.engine_parts import request_of, small_arena

PIECE = 8


class Play:
    """Prompts that are read by pieces of 8 tokens."""

    def __init__(self) -> None:
        self.arena: Arena = small_arena(max_batch=20)
        self.slots = Slots(self.arena, lambda: 0, reuse=True, clear=False)
        self.order = ReadingOrder(self.slots)
        self.readers: list[Request] = []
        self.waiting: list[Request] = []

    def submit(self, length: int, first: int = 0, **params: Any) -> Request:
        """One that waits; ``first`` is its first token."""
        request = request_of(self.arena, [first, *range(1, length)], **params)
        self.waiting.append(request)
        return request

    def reading(self, length: int, first: int = 0, **params: Any) -> Request:
        """One of whose prompt nothing has been read yet, with a slot."""
        request = self.submit(length, first, **params)
        self._admit(request)
        return request

    def running(self, **params: Any) -> None:
        """A row, of a prompt that no other one begins like."""
        self.readers.remove(self.reading(3, first=63, **params))

    def _admit(self, request: Request) -> None:
        self.waiting.remove(request)
        self.slots.take(request)
        self.readers.append(request)

    def pieces(self, count: int) -> list[Request]:
        """The requests of the next ``count`` pieces."""
        chosen = []
        while len(chosen) < count:
            request = self.order.choose(self.readers, self.waiting)
            assert request is not None
            if request in self.waiting:
                self._admit(request)
            request.cached = min(len(request.prompt), request.cached + PIECE)
            self.order.note(request)
            if request.cached == len(request.prompt):
                self.readers.remove(request)
            chosen.append(request)
        return chosen


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    # Prompts are longer than the arena's sequences; their tokens are of no interest here.
    monkeypatch.setattr(Arena, "write", lambda *_: None)
    return Play()


def names(requests: Sequence[Request], **of: Request) -> str:
    """The names of ``requests``, each a letter."""
    return "".join(next(name for name, request in of.items() if request is each) for each in requests)


def test_a_short_prompt_does_not_wait_for_a_long_one(play: Play) -> None:
    long = play.reading(200, first=1)
    assert play.pieces(2) == [long, long]
    short = play.submit(20, first=2)
    assert names(play.pieces(4), l=long, s=short) == "slsl"


def test_prompts_of_similar_length_stay_in_order_and_one_that_was_begun_is_finished_first(play: Play) -> None:
    begun = play.reading(120, first=1)
    older, other = play.submit(100, first=2), play.submit(70, first=3)
    assert names(play.pieces(15), b=begun, o=older, x=other) == "b" * 15
    assert names(play.pieces(13), o=older, x=other) == "o" * 13


def test_a_long_prompt_has_every_other_piece_beside_any_number_of_short_ones(play: Play) -> None:
    long, chosen = play.submit(200, first=1), list[Request]()
    for number in range(16):
        play.submit(8, first=2 + number)
        chosen += play.pieces(1)
    assert [index for index, request in enumerate(chosen) if request is long] == [1, 3, 5, 7, 9, 11, 13, 15]


def test_the_piece_of_the_oldest_goes_to_the_client_with_the_fewest_slots(play: Play) -> None:
    for _ in range(2):
        play.running(client=("10.0.0.7", "chat 1"))
    play.running(client=("10.0.0.8", "chat 2"))
    for number in range(8):
        play.submit(8, first=number, client=("10.0.0.7", "chat 1"))
    own, other = play.submit(8, first=8, client=("10.0.0.7", "chat 3")), play.submit(8, first=9, client=("10.0.0.9",))
    chosen = play.pieces(4)
    assert chosen[1] is other, "its client has no slot"
    assert chosen[3] is own, "of one address the chat without a slot"


def test_a_client_with_few_slots_does_not_stop_the_long_prompts_of_another_one(play: Play) -> None:
    for number in range(3):
        play.running(client=("10.0.0.7", f"chat {number}"))
    long = play.reading(400, first=1, client=("10.0.0.7", "chat 4"))
    others = [play.submit(200, first=2 + number, client=("10.0.0.8", f"chat {number}")) for number in range(2)]
    for number in range(16):
        play.submit(8, first=4 + number, client=("10.0.0.7", f"short {number}"))
    assert names(play.pieces(8)[1::2], a=long, b=others[0]) == "baba"


def test_a_request_does_not_wait_for_all_choices_of_another_one_of_its_client(play: Play) -> None:
    for number in range(8):
        play.submit(8, first=number, client=("10.0.0.7", "chat 1"))
    other = play.submit(8, first=8, client=("10.0.0.7", "chat 2"))
    chosen = []
    for _ in range(3):
        # Each one ends before the next is chosen, so none of them has a slot then.
        request = play.order.choose([], play.waiting)
        assert request is not None
        play.order.note(request)
        play.waiting.remove(request)
        chosen.append(request)
    assert chosen[2] is other


def test_the_greatest_priority_goes_first_whatever_the_length(play: Play) -> None:
    low = play.submit(8, first=1, priority=-1)
    high, higher = play.submit(60, first=2), play.submit(100, first=3, priority=2**63 - 1)
    assert play.pieces(22) == [higher] * 13 + [high] * 8 + [low]


def test_a_prompt_waits_for_one_that_begins_like_it_and_shares_what_that_one_reads(play: Play) -> None:
    play.reading(16 + 200, first=1)
    first = play.readers[0]
    second = play.submit(17, first=1)
    assert play.pieces(3) == [first, first, second], "16 tokens of the 17"
    assert second.stats.reused_tokens == 16


def test_a_long_prompt_whose_kv_is_known_is_short(play: Play) -> None:
    known = play.reading(120, first=1)
    play.pieces(15)
    play.reading(60, first=2)
    again = play.submit(125, first=1)
    assert known.cached == 120 and play.pieces(1) == [again]
    assert again.stats.reused_tokens == 120


def test_a_request_that_has_ended_is_not_chosen(play: Play) -> None:
    ended, waiting = play.reading(8, first=1), play.submit(100, first=2)
    ended.end("cancelled")
    assert play.order.choose(play.readers, play.waiting) is waiting
    waiting.end("cancelled")
    assert play.order.choose(play.readers, play.waiting) is None
