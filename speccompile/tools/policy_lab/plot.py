"""Plots of simulated runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speccompile.errors import InvalidOption
from speccompile.tools.policy_lab.simulate import SimulatedRun

#: Number of steps over which a speed is averaged.
WINDOW = 50


def plot(path: str | os.PathLike[str], title: str, outcomes: Mapping[str, SimulatedRun]) -> None:
    """Write a PNG: for each run, tokens per second and draft length over simulated time.

    Raises:
        InvalidOption: matplotlib is not installed, or the file cannot be written.
    """
    pyplot = _pyplot(path)
    figure, (speeds, tiers) = pyplot.subplots(2, 1, sharex=True, figsize=(10, 6), layout="constrained")
    for name, outcome in outcomes.items():
        times, speed, draft_lens = series(outcome)
        speeds.plot(times, speed, label=f"{name}: {1e3 * outcome.speed:.0f}/s")
        tiers.plot(times, draft_lens, label=name, alpha=0.8)
    speeds.set(title=title, ylabel="tokens per second")
    tiers.set(xlabel="simulated seconds", ylabel=f"draft length, mean of {WINDOW} steps")
    speeds.legend(fontsize="small")
    try:
        figure.savefig(Path(path), format="png", dpi=120)
    except OSError as error:
        reason = f"it cannot be written ({error.strerror})"
        raise InvalidOption(where="policy-lab", name="plot", value=str(path), reason=reason) from error
    finally:
        pyplot.close(figure)


def series(outcome: SimulatedRun) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    """Seconds, and tokens per second and mean draft length of the window of steps that ends there."""
    times, speed, draft_lens, before = [], [], [], 0.0
    for begin in range(0, outcome.steps, WINDOW):
        window = outcome.timeline[begin : begin + WINDOW]
        now = window[-1][0]
        times.append(now / 1e3)
        speed.append(1e3 * sum(emitted for _, _, emitted in window) / (now - before))
        draft_lens.append(sum(draft_len for _, draft_len, _ in window) / len(window))
        before = now
    return times, speed, draft_lens


def _pyplot(path: str | os.PathLike[str]) -> Any:
    try:
        import matplotlib
    except ImportError as error:
        reason = "it needs the library matplotlib: pip install 'speccompile[plots]'"
        raise InvalidOption(where="policy-lab", name="plot", value=str(path), reason=reason) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
