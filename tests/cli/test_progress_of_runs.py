"""Progress over many runs where stderr is not a terminal."""

from __future__ import annotations

import pytest

from speccompile.cli import progress


def test_lines_appear_each_minute(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.count_runs("Decoding", 100) as after_run:
        for _ in range(10):
            now += 25.0
            after_run()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Decoding:")]
    assert lines == ["Decoding: 3 of 100", "Decoding: 6 of 100", "Decoding: 9 of 100"]
