"""Ctrl-C at any moment leaves an engine that goes on; so does the end of the interpreter."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile.utils.interrupts import deferred_interrupts
from support.engines import MAX_BATCH, Make, greedy, prompt


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """A shell starts what runs in its background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_comes_behind_the_block() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt):
        with deferred_interrupts():
            with deferred_interrupts():
                press()
                reached.append(1)
            reached.append(2)
        reached.append(3)
    assert reached == [1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_programs_own_handler_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with deferred_interrupts():
            press()
            assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def timer() -> Iterator[None]:
    """SIGINT when SIGALRM comes. The deadlock guard of the other tests uses the same signal, and waits meanwhile."""
    guard = signal.alarm(0)
    before = signal.signal(signal.SIGALRM, lambda *_: press())
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    signal.alarm(guard)


@pytest.mark.parametrize("call", ["submit", "generate"])
def test_an_interrupt_while_requests_are_queued_leaves_none_behind(
    make: Make, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    engine = (spec := make()).engine
    push = engine.waiting.push

    def interrupted(*arguments: Any) -> None:
        push(*arguments)
        press()

    monkeypatch.setattr(engine.waiting, "push", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.submit(prompt(6)) if call == "submit" else spec.generate(torch.tensor([prompt(6)]))
    assert engine.idle and len(engine.waiting) == 0


@pytest.mark.usefixtures("timer")
def test_interrupts_at_random_moments_of_generate(make: Make, model: LlamaForCausalLM) -> None:
    spec, rng = make(), random.Random(0)
    ids = torch.tensor([prompt(6)])
    took, interrupted = 0.1, 0
    for _ in range(150):
        started = time.perf_counter()
        # Within the block: a process that waits for its core may be called as soon as the timer is set.
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.random() * took + 1e-6)
            spec.generate(ids, max_new_tokens=40)
            signal.setitimer(signal.ITIMER_REAL, 0)
            took = time.perf_counter() - started
        except KeyboardInterrupt:
            interrupted += 1
        assert not spec.engine.loop._lock.locked()
        assert spec.engine.idle and spec.engine.capacity().free_slots == MAX_BATCH
    assert interrupted > 50
    assert spec.generate(ids, max_new_tokens=40)[0, 6:].tolist() == greedy(model, prompt(6), 40)


EXIT = """
import asyncio, torch
from support.tiny import tiny_llama
from speccompile import wrap

spec = wrap(tiny_llama(), tiers=(0, 3), max_batch=2, max_len=1024, backend="eager")

async def main():
    other = spec.engine.submit([1, 2, 3], max_new_tokens=1000)
    async for _ in spec.engine.submit([4, 5, 6], max_new_tokens=1000):
        break

asyncio.run(main())
"""


def test_a_program_may_end_while_a_driver_steps() -> None:
    folder = Path(__file__).parents[1]
    env = os.environ | {"PYTHONPATH": f"{folder.parent}:{folder}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", EXIT], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
