"""The benchmark of recurrent targets: what it states of a slot, and its tables."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from benchmarks import recurrent
from support.recurrent_layout import KEPT, KV_OF_A_TOKEN, STATE, recurrent_layout


def test_bytes_of_a_slot_are_those_of_its_states_and_of_what_is_kept_beside_them() -> None:
    spec: Any = SimpleNamespace(arena=SimpleNamespace(layout=recurrent_layout()))
    assert recurrent.bytes_of(spec) == {"state": STATE + 8, "kept inputs": KEPT, "KV of a token": KV_OF_A_TOKEN}


def test_the_tables_have_times_ratios_and_bytes() -> None:
    both = {"median": 2.5, "least": 2.0}
    report = {"milliseconds": {"K=0, absorbs 1": both}, "ratios": {"T=8 to T=1": both}, "bytes": {"state": 1024}}
    shown = io.StringIO()
    for table in recurrent.tables(report):
        Console(file=shown, width=100).print(table)
    text = shown.getvalue()
    for part in ("K=0, absorbs 1", "T=8 to T=1", "2.50x", "state", "1,024"):
        assert part in text
