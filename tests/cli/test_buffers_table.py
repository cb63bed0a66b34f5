"""The table of buffers that ``inspect`` shows."""

from __future__ import annotations

import io

from rich.console import Console

from speccompile.cli.tables import buffers_table
from support.recurrent_layout import KEPT, STATE, recurrent_layout


def test_recurrent_state_has_a_line_for_each_shape_and_the_bytes_of_a_slot() -> None:
    shown = io.StringIO()
    Console(file=shown, width=140).print(buffers_table(recurrent_layout(), ()))
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.getvalue().splitlines() if "│" in line]
    recurrent = [line[1:] for line in lines if line[0] == "recurrent"]
    assert [line[0] for line in recurrent] == [
        "absorbed_length",
        "conv_0_kept .. conv_1_kept (2)",
        "delta_0 .. delta_1 (2)",
        "delta_0_kept .. delta_1_kept (2)",
        "all 7",
        "of one slot",
    ]
    assert recurrent[-1][-1] == f"{STATE + KEPT + 8:,}"
