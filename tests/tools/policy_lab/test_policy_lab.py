"""The simulator, the traces it replays, and the promise that the cost policy does not lose."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from speccompile.cli import app
from speccompile.errors import InvalidTrace
from speccompile.policies import Cost, CostTable, Done, Ema, Fixed, Ladder, TierCost
from speccompile.tools.policy_lab import TRACES, Recorder, read_trace, simulate, synthetic_texts
from speccompile.tools.policy_lab.cost_tables import TABLES, cost_table
from speccompile.tools.policy_lab.plot import WINDOW, series
from speccompile.tools.policy_lab.simulate import oracle
from speccompile.tools.policy_lab.texts import RecordedText, texts_of
from support.errors import raises

TIERS = (0, 1, 3, 7)
COSTS = {name: cost_table(name, TIERS) for name in TABLES}


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("trace", TRACES)
def test_cost_does_not_lose(trace: str, costs: str) -> None:
    table, texts = COSTS[costs], synthetic_texts(trace, seed=11)
    ladder = Ladder(TIERS, table)
    statics = {k: simulate(Fixed(k), texts, ladder, table, ready=False).speed for k in TIERS}
    best = max(statics.values())
    speed = simulate(Cost(), texts, ladder, table, ready=False).speed
    assert speed >= 0.98 * best
    reachable = oracle(texts, ladder, table, ready=False).speed
    if reachable >= 1.1 * best:
        assert speed - best >= 0.6 * (reachable - best)


@pytest.mark.parametrize("seed", [0, 5, 20])
@pytest.mark.parametrize("trace", ["seldom", "half", "often"])
def test_chance_alone_does_not_lead_it_astray(trace: str, seed: int) -> None:
    """Seeds by which an estimate over fewer steps loses more: it follows what is nothing but luck."""
    table, texts = COSTS["linear"], synthetic_texts(trace, seed)
    ladder = Ladder(TIERS, table)
    best = max(simulate(Fixed(k), texts, ladder, table, ready=False).speed for k in TIERS)
    assert simulate(Cost(), texts, ladder, table, ready=False).speed >= 0.98 * best


def test_results_that_come_a_step_late() -> None:
    table, texts = COSTS["linear"], synthetic_texts("phases", seed=3)
    ladder = Ladder(TIERS, table)
    best = max(simulate(Fixed(k), texts, ladder, table, ready=False).speed for k in TIERS)
    assert simulate(Cost(), texts, ladder, table, late=True, ready=False).speed > 1.1 * best


def test_ema_loses_where_costs_matter() -> None:
    table, texts = COSTS["flat"], synthetic_texts("seldom", seed=1)
    ladder = Ladder(TIERS, table)
    best = max(simulate(Fixed(k), texts, ladder, table, ready=False).speed for k in TIERS)
    assert simulate(Ema(), texts, ladder, table, ready=False).speed < 0.95 * best


def test_a_replay_by_hand() -> None:
    """Eight tokens, of which a step at 0 gets three drafts right and one at 4 none."""
    text = RecordedText(10, [3, 2, 1, 0, 0, 2, 1, 0], [7, 7, 7, 7, 0, 7, 7, 7], {})
    table = CostTable({(1, k): TierCost(1.0 + k) for k in TIERS})
    ladder = Ladder(TIERS, table)
    outcome = simulate(Fixed(7), [text], ladder, table)
    # At 0 four tokens, at 4 nothing is offered and K=0 runs, at 5 the rest, within the tier that fits two places.
    assert [emitted for _, _, emitted in outcome.timeline] == [4, 1, 3]
    assert outcome.residency == {0: 1, 3: 1, 7: 1}
    assert outcome.milliseconds == 8 + 1 + 4
    assert simulate(Fixed(0), [text], ladder, table).milliseconds == 8


def test_steps_whose_drafts_are_found_cost_less(tmp_path: Path) -> None:
    """A lookup has drafts for the first step, a network drafts for the second."""
    drafted = {(1, k): TierCost(2.0 + k) for k in TIERS}
    table = CostTable(drafted, {**drafted, **{(1, k): TierCost(1.0 + k) for k in TIERS if k}})
    recorder = Recorder(tmp_path / "run.jsonl", TIERS, table, ready=True)
    recorder.add(Done(3, (0,), (10,), (3,), (3,), (4,), ((0.8, 0.4, 0.2),), found=(True,)), [3])
    recorder.add(Done(3, (0,), (14,), (3,), (0,), (1,), found=(False,)), [7])
    recorder.close()
    trace = read_trace(tmp_path / "run.jsonl")
    assert trace.costs == table
    (text,) = texts_of(trace)
    assert [text.found(position) for position in range(5)] == [True, True, True, False, False]
    # At 1 the first draft is known to be right.
    assert text.scores(1, 3) == (0.5, 0.25)
    # The last two steps have no lookup; the last one has no draft left to verify.
    longer = RecordedText(10, [*text.runs, 0], [*text.available, 7], text.draft_scores, text.found_at)
    outcome = simulate(Fixed(3), [longer], Ladder(TIERS, table), table)
    assert outcome.by_text == [outcome.milliseconds] == [4 + 3 + 2]


def test_any_number_of_rows_ends() -> None:
    texts = synthetic_texts("mixture", 2)[:5]
    ladder = Ladder(TIERS, COSTS["linear"])
    for rows in (1, 2, 8):
        outcome = simulate(Fixed(3), texts, ladder, COSTS["linear"], max_rows=rows)
        assert outcome.tokens >= sum(text.length for text in texts)


def record(path: Path, costs: CostTable | None = None) -> list[Done]:
    steps = [
        Done(7, (4, 9), (10, 20), (7, 7), (2, 0), (3, 1), ((0.9,) * 7, (0.5,) * 7), 12.5),
        Done(7, (4, 9), (13, 21), (7, 0), (7, 0), (8, 1), ((0.9,) * 7, ()), 11.0),
        Done(7, (9,), (22,), (7,), (1,), (2,), ((0.25,) * 7,), None),
    ]
    recorder = Recorder(path, TIERS, costs, ready=True)
    for done in steps:
        recorder.add(done, [7 if count else 0 for count in done.proposed])
    recorder.close()
    return steps


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    steps = record(tmp_path / "run.jsonl", COSTS["cpu"])
    trace = read_trace(tmp_path / "run.jsonl", TIERS)
    assert list(trace.steps) == steps and trace.costs == COSTS["cpu"] and trace.ready
    assert trace.draft_lens == TIERS and trace.censored == 0
    first, second = texts_of(trace)
    assert list(first.runs) == [2, 1, 0, 7, 6, 5, 4, 3, 2, 1, 0]
    assert list(second.runs) == [0, 0, 1, 0] and list(second.available) == [7, 0, 7, 6]
    assert first.scores(0, 2) == (0.9, 0.9)
    ladder = Ladder(TIERS, trace.costs)
    assert simulate(Fixed(7), texts_of(trace), ladder, COSTS["cpu"]).tokens == 15


def test_what_a_small_tier_cut_off_is_told(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run.jsonl", TIERS, None, ready=True)
    recorder.add(Done(1, (0,), (10,), (1,), (1,), (2,)), [7])
    recorder.add(Done(1, (0,), (12,), (1,), (0,), (1,)), [7])
    recorder.close()
    assert read_trace(tmp_path / "run.jsonl").censored == 0.5


def entries(fixed: float) -> dict[str, list[list[float]]]:
    return {"entries": [[1, k, fixed, 0.0] for k in TIERS], "undrafted": []}


def changed(lines: list[str], at: int, **columns: object) -> list[str]:
    return [*lines[:at], json.dumps(json.loads(lines[at]) | columns), *lines[at + 1 :]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda lines: [], "it is not a trace"),
        (lambda lines: ["{}"], "it is not a trace"),
        (lambda lines: lines[:1], "it has no steps"),
        (lambda lines: [lines[0].replace('"format":2', '"format":3'), *lines[1:]], "format 3"),
        (lambda lines: [*lines, lines[1][:20]], "it is not a trace"),
        (lambda lines: changed(lines, 1, accepted=[1]), "differ in length"),
        (lambda lines: changed(lines, 0, draft_lens=[]), "do not rise from 0"),
        (lambda lines: changed(lines, 0, draft_lens=[0, 7, 3, 1]), "do not rise from 0"),
        (lambda lines: changed(lines, 0, costs=entries(math.nan)), "must be positive and finite"),
        (lambda lines: changed(lines, 0, costs=entries(1.0) | {"undrafted": [[1, 0, 1.0, 0.0]]}), "a tier is missing"),
        (lambda lines: changed(lines, 1, found=[True]), "differ in length"),
        (lambda lines: changed(lines, 1, k=2), "contradict each other"),
        (lambda lines: changed(lines, 1, accepted=[-2, 0]), "contradict each other"),
        (lambda lines: changed(lines, 1, emitted=[10**9, 1]), "contradict each other"),
        (lambda lines: changed(lines[:2], 1, emitted=[0, 0]), "no step of it emitted a token"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, change, reason: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "run.jsonl"
    record(path, COSTS["cpu"])
    path.write_text("\n".join(change(path.read_text().splitlines())))
    with raises(InvalidTrace, path=str(path), reason=re.compile(reason)):
        read_trace(path)


def test_a_trace_of_another_ladder(tmp_path: Path) -> None:
    record(tmp_path / "run.jsonl")
    with raises(InvalidTrace, reason=re.compile(r"recorded with tiers \[0, 1, 3, 7\].*largest requested tier is 15")):
        read_trace(tmp_path / "run.jsonl", (0, 1, 3, 7, 15))
    with raises(InvalidTrace, reason=re.compile("cannot be opened")):
        read_trace(tmp_path / "none.jsonl")


def test_a_run_goes_on_when_its_trace_cannot(tmp_path: Path) -> None:
    """Another thread closes it before a step's end; or the disk is full, which is reported when it is closed."""
    (done, *_) = record(tmp_path / "run.jsonl")
    recorder = Recorder(tmp_path / "other.jsonl", TIERS, None, ready=True)
    recorder.close()
    recorder.add(done, [7, 7])
    full = Recorder(tmp_path / "full.jsonl", TIERS, None, ready=True)
    full._file.close()
    full._file = open("/dev/full", "w")  # noqa: SIM115  the recorder closes it
    full.add(done, [7, 7])
    with pytest.raises(OSError, match="No space left"):
        full.close()


# --- the command ---------------------------------------------------------------------------------


def lab(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["policy-lab", *arguments], env={"COLUMNS": "140"})


def test_the_command_shows_statics_policies_and_the_oracle(tmp_path: Path) -> None:
    record(tmp_path / "run.jsonl", COSTS["cpu"])
    result = lab(str(tmp_path / "run.jsonl"), "--policy", "cost", "--policy", "ema:warmup=0")
    assert result.exit_code == 0, result.output
    for name in ("fixed:0", "fixed:7", "cost", "ema:warmup=0", "oracle", "15 tokens"):
        assert name in result.stdout, name


def test_the_command_says_whose_costs_it_takes(tmp_path: Path) -> None:
    record(tmp_path / "timed.jsonl", COSTS["linear"])
    record(tmp_path / "not.jsonl")
    asked = [["timed.jsonl"], ["timed.jsonl", "--tiers", "0,2"], ["timed.jsonl", "--costs", "flat"], ["not.jsonl"]]
    for (name, *options), says in zip(asked, ["of the trace", "'cpu'", "'flat'", "'cpu'"], strict=True):
        result = lab(str(tmp_path / name), "--policy", "fixed:0", *options)
        # A long path is cut into lines.
        assert f"costs {says}" in " ".join(result.stdout.split()), result.output


def test_the_command_makes_traces_up() -> None:
    result = lab("never", "--policy", "fixed:0", "--costs", "linear", "--tiers", "0,2")
    assert result.exit_code == 0, result.output
    assert "fixed:2" in result.stdout and "0: 100%" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["none.jsonl"], "cannot be opened"),
        (["never", "--costs", "dear"], "choose from flat, linear, cpu"),
        (["never", "--policy", "fixed:2"], "built: 0, 1, 3, 7"),
        (["never", "--tiers", "1,2"], "0 is missing"),
        (["never", "--rows", "9"], "known of 8 rows at most"),
    ],
)
def test_the_command_refuses(arguments: list[str], says: str) -> None:
    result = lab(*arguments)
    assert result.exit_code == 2 and says in result.stderr


def test_a_plot_needs_its_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = lab("always", "--policy", "fixed:7", "--plot", str(tmp_path / "plot.png"))
    assert result.exit_code == 2 and "speccompile[plots]" in result.stderr


def test_a_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert lab("always", "--policy", "cost", "--plot", str(tmp_path / "plot.png")).exit_code == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = lab("always", "--policy", "fixed:7", "--plot", str(tmp_path / "none" / "plot.png"))
    assert result.exit_code == 2 and "there is no folder" in result.stderr


def test_no_more_rows_are_replayed_than_costs_are_known_of(tmp_path: Path) -> None:
    """Two requests beside each other, over costs of one row: they run one after another."""
    path = tmp_path / "run.jsonl"
    record(path, cost_table("linear", TIERS, row_counts=(1,)))
    shown = lab(str(path), "--policy", "fixed:0").stdout
    (line,) = (line for line in shown.splitlines() if line.split()[1:2] == ["fixed:0"])
    assert line.split()[7] == "15"


def test_what_is_plotted_adds_up() -> None:
    outcome = simulate(Fixed(0), synthetic_texts("never"), Ladder(TIERS, COSTS["flat"]), COSTS["flat"])
    times, speed, draft_lens = series(outcome)
    assert len(times) == outcome.steps // WINDOW and times[-1] == pytest.approx(outcome.milliseconds / 1e3)
    assert set(draft_lens) == {0} and speed == pytest.approx([100.0] * len(times))
