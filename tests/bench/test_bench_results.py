"""Files of results: a killed run continues, and files are joined."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from speccompile.bench.answers import Answer, Steps
from speccompile.bench.method_names import PLAIN, TRANSFORMERS
from speccompile.bench.results import Answered, BenchRun, ResultFile, read_results
from speccompile.bench.summary import ALL_MACHINES, summarize
from speccompile.errors import InvalidResults
from support.errors import raises

SETTINGS = {"model": "tiny", "temperature": 0.0, "weights": "same", "kv": "same"}
RUN = BenchRun(SETTINGS, {PLAIN: {"mode": "none"}, "ngram K=3": {"mode": "ngram"}}, {"name": "one"})
STEPS = Steps(("3", "3"), (3, 2), (2, 0), (3, 1), (10.0, None), ((0.5, 0.25), ()))


def answer(line: str, prompt: str, *, seconds: float = 1.0, round: int = 0, tokens: tuple[int, ...] = ()) -> Answered:
    steps = Steps(("0",) * 4, (0,) * 4, (0,) * 4, (1,) * 4, (10.0,) * 4, ((),) * 4) if line == PLAIN else STEPS
    ids = tokens or (1, 2, 3, 4, 5)
    found = Answer(ids, 0.5, 0.5 + seconds, "eos", steps, {} if line == PLAIN else {"ngram": (5, 2)})
    return Answered(line, prompt, "qa", 0, round, 7, found)


def write(path: Path, *answers: Answered, run: BenchRun = RUN) -> None:
    file = ResultFile(path, run)
    for each in answers:
        file.add(each)
    file.close()


def test_a_file_has_what_was_added(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    added = [answer(PLAIN, "a"), answer("ngram K=3", "a")]
    write(path, *added)
    results = read_results([path])
    assert results.answers == {"one": added} and results.runs == [RUN]
    # Given twice, it adds nothing.
    assert read_results([path, path]).answers == results.answers


def test_a_killed_run_continues(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    write(path, answer(PLAIN, "a"), answer("ngram K=3", "a"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    file = ResultFile(path, RUN)
    assert file.results.done("one") == {(PLAIN, "a", 0, 0)} and not file.results.done("another")
    file.add(answer("ngram K=3", "a"))
    file.close()
    assert read_results([path]).done("one") == {(PLAIN, "a", 0, 0), ("ngram K=3", "a", 0, 0)}


def test_results_of_other_settings_are_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "bench.jsonl", tmp_path / "other.jsonl"
    write(path, answer(PLAIN, "a"))
    warmer = replace(RUN, settings={**SETTINGS, "temperature": 1.0})
    reason = re.compile(re.escape("its settings differ: temperature is 0.0 and 1.0; use another file"))
    with raises(InvalidResults, path=str(path), reason=reason):
        ResultFile(path, warmer)
    write(other, answer(PLAIN, "a"), run=warmer)
    with raises(InvalidResults, path=str(other), reason=reason):
        read_results([path, other])
    changed = replace(RUN, lines={"ngram K=3": {"mode": "ngram", "options": {"max_ngram": "5"}}})
    with raises(InvalidResults, path=str(path), reason=re.compile("its line 'ngram K=3' differ")):
        ResultFile(path, changed)
    # Further methods are welcome.
    ResultFile(path, replace(RUN, lines={"suffix K=3": {"mode": "suffix"}})).close()
    assert list(read_results([path]).lines) == [PLAIN, "ngram K=3", "suffix K=3"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}\n", "line 1 is not of a file of results (KeyError"),
        ("nothing\n", "line 1 is not of a file of results (JSONDecodeError"),
        ('{"kind":"answer"}\n', "no line of kind 'run' is before it"),
        ('{"kind":"run","format":9}\n', "it is of format 9, and only 1 is read"),
        ("\n", "it has no answers"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_text(text)
    with raises(InvalidResults, path=str(path), reason=re.compile(re.escape(reason))):
        read_results([path])
    with raises(InvalidResults, reason=re.compile("cannot be read")):
        read_results([tmp_path / "missing"])


def test_machines_are_summarized_one_by_one_and_together(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write(first, answer(PLAIN, "a", seconds=4.0), answer("ngram K=3", "a", seconds=2.0))
    fast = replace(RUN, machine={"name": "two"})
    write(second, answer(PLAIN, "b", seconds=1.0), answer("ngram K=3", "b", seconds=0.25), run=fast)
    summary = summarize(read_results([first, second]))
    assert [machine.name for machine in summary.machines] == ["one", "two", ALL_MACHINES]
    speeds = [machine.lines[1].figures.speed for machine in summary.machines]
    assert [None if speed is None else speed.value for speed in speeds] == [2.0, 4.0, 5 / 2.25]
    assert summary.machines[-1].lines[1].figures.prompts == 2


def test_the_median_round_stands_for_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    rounds = [answer("ngram K=3", "a", seconds=seconds, round=i) for i, seconds in enumerate((9.0, 2.0, 1.0))]
    write(path, answer(PLAIN, "a", seconds=4.0), *rounds)
    _, line = summarize(read_results([path])).machines[0].lines
    assert line.figures.speed is not None and line.figures.speed.value == 2.0
    assert (line.same, line.compared, line.drafters) == (3, 3, {"ngram": (5, 2)})


def test_texts_are_compared_where_they_should_be_equal(tmp_path: Path) -> None:
    wrong = answer("ngram K=3", "a", tokens=(1, 2, 3, 9, 5))
    lines = {**RUN.lines, TRANSFORMERS: {}}
    for temperature, compared in ((0.0, [0, 1, 1]), (0.7, [0, 1, 0])):
        path = tmp_path / f"{temperature}.jsonl"
        run = replace(RUN, settings={**SETTINGS, "temperature": temperature}, lines=lines)
        write(path, answer(PLAIN, "a"), wrong, replace(answer(PLAIN, "a"), line=TRANSFORMERS), run=run)
        machine = summarize(read_results([path])).machines[0]
        assert [line.compared for line in machine.lines] == compared
        assert machine.lines[1].same == 0 and machine.lines[1].agreement == 3 / 5
        assert machine.lines[0].agreement is None
        assert machine.kernels is not None and machine.kernels.value == 1.0
