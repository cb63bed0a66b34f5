"""The report in a terminal of 80 columns."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from speccompile.report.data import Report
from speccompile.report.memory_data import Buffer
from speccompile.report.program_data import Collective
from speccompile.report.render.terminal import show
from support.reports import tiny_report, tree_report


def text_of(report: Report, draft_len: int) -> str:
    out = io.StringIO()
    show(report, draft_len, Console(file=out, width=80, highlight=False))
    return out.getvalue()


@pytest.mark.parametrize(("make", "draft_len"), [(tiny_report, 3), (tree_report, 5)])
def test_names_stay_whole_in_80_columns(make, draft_len: int) -> None:  # type: ignore[no-untyped-def]
    report = make()
    text = text_of(report, draft_len)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    words = set(text.split())
    tier = next(tier for tier in report.tiers if tier.draft_len == draft_len)
    names = [stage.name for program in (report.model, tier.program) for stage in program.stages]
    names += [kernel.name.removeprefix("aten.") for kernel in tier.kernels]
    names += [buffer.name for buffer in report.buffers if buffer.group in ("sequence", "drafter")]
    assert not [name for name in names if name not in words]
    # No number or name is cut.
    assert "\N{HORIZONTAL ELLIPSIS}" not in text


def test_it_begins_with_the_verdict() -> None:
    text = text_of(tiny_report(), 3)
    assert " ".join(text.split()).index(tiny_report().verdict[0]) < text.index("Tiers")
    for part in ("Milliseconds of a step", "attention output", "Kernels of K=3", "Buffers of the arena", "saves"):
        assert part in text


def test_recurrent_state_has_the_bytes_of_one_slot() -> None:
    buffers = (
        Buffer("delta_0", "recurrent state", (3, 2, 4, 4), "float32", 3 * 128),
        Buffer("delta_0_kept", "recurrent state", (3, 8, 10), "float32", 3 * 320),
        Buffer("k_1", "KV", (3, 64, 2, 4), "float32", 3 * 2048),
    )
    text = text_of(dataclasses.replace(tiny_report(), buffers=buffers), 3)
    line = next(line for line in text.splitlines() if "of one slot" in line)
    assert "recurrent state" in line and "448" in line
    assert "of one slot" not in text_of(tiny_report(), 3)


def test_collectives_are_listed_with_their_bytes() -> None:
    report = tiny_report()
    calls = (Collective("decoder_layer", "all_reduce", 4, (1, 4, 64), "float32", 4096),)
    tiers = tuple(dataclasses.replace(tier, collectives=calls) for tier in report.tiers)
    text = text_of(dataclasses.replace(report, tiers=tiers), 3)
    (line,) = [line for line in text.splitlines() if "all_reduce" in line]
    assert line.split() == ["4", "all_reduce", "float32[1,", "4,", "64]", "decoder_layer", "4,096"]
    assert "Collectives" not in text_of(report, 3)
