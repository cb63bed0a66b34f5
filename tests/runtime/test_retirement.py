"""How requests leave: with what error, and what they give back."""

from __future__ import annotations

from support.engine_parts import Parts


def test_what_a_callback_raises_ends_its_request_alone_and_an_interrupt_is_kept() -> None:
    parts, interrupt = Parts(), KeyboardInterrupt()
    failing, other = parts.running(), parts.running()
    parts.retirement.fail_all([failing], interrupt)
    assert parts.batch.rows == [other] and failing.finished and failing.closed and not other.finished
    assert parts.slots.owned == [other]
    assert parts.retirement.take_interrupt() is interrupt and parts.retirement.take_interrupt() is None
