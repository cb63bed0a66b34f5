"""Printed steps run with each of their statements timed."""

from __future__ import annotations

from speccompile.graph.printing import load_python
from speccompile.report.stopwatch import timing, with_laps

SOURCE = '''"""A step."""

import torch


def layer(x):
    """Layers 0, 1."""
    a = x + 1  # float32[2]
    a.mul_(2)
    return a


def step(
    x,  # input float32[2]
):
    # capture
    first = layer(x)
    second = layer(first)
    return (second,)


def make_inputs(seed=0):
    unused = 0
    return [torch.ones(2)]
'''


def test_statements_are_timed_and_results_stay() -> None:
    plain, timed = load_python(SOURCE, "<plain>"), load_python(with_laps(SOURCE), "<timed>")
    with timing() as laps:
        (found,) = timed["step"](*timed["make_inputs"]())
    assert found.tolist() == plain["step"](*plain["make_inputs"]())[0].tolist() == [10.0, 10.0]
    assert set(laps) == {("step", 0), ("step", 1), ("layer", 0), ("layer", 1)}
    assert all(seconds > 0 for seconds in laps.values())
    # A call takes longer than what it calls.
    assert laps["step", 0] + laps["step", 1] > laps["layer", 0] + laps["layer", 1]


def test_nothing_is_noted_outside() -> None:
    timed = load_python(with_laps(SOURCE), "<timed>")
    with timing() as laps:
        pass
    timed["step"](*timed["make_inputs"]())
    assert not laps
