"""Results of runs as JSON lines: the state of a run that can be resumed, and the input of every table.

A file begins with a line of kind ``run``: the settings, the lines of the table and the machine. Each line of kind
``answer`` is one answer of that run. A resumed run appends a further line of kind ``run``, so files may also be
concatenated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO

from speccompile.bench.answers import Answer, Steps
from speccompile.errors import InvalidResults

FORMAT = 1


@dataclass(frozen=True)
class BenchRun:
    """Circumstances of answers.

    Args:
        settings: all that the lines of the table have in common, by name. Results of different settings do not belong
            in one table.
        lines: for each line of the table, the facts about it.
        machine: the machine. ``name`` identifies its kind.
    """

    settings: Mapping[str, Any]
    lines: Mapping[str, Mapping[str, Any]]
    machine: Mapping[str, Any]


@dataclass(frozen=True)
class Answered:
    """One answer of a line of the table.

    Args:
        line: the name of the line.
        prompt, category, turn: the conversation, its category, and the index of the turn.
        round: the index of the repetition.
        prompt_tokens: number of tokens before the answer.
    """

    line: str
    prompt: str
    category: str
    turn: int
    round: int
    prompt_tokens: int
    answer: Answer

    @property
    def key(self) -> tuple[str, str, int, int]:
        """Identifies the answer in its run."""
        return (self.line, self.prompt, self.turn, self.round)

    def as_json(self) -> dict[str, Any]:
        """Data of a line of the file."""
        data = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "answer"}
        answer = asdict(self.answer)
        if not any(self.answer.steps.scores):
            answer["steps"]["scores"] = []
        return {"kind": "answer", **data, **answer}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Answered:
        """Read the data of :meth:`as_json`. Raises KeyError, TypeError or ValueError for other data."""
        columns = dict(data["steps"])
        count = len(columns["tiers"])
        scores = tuple(tuple(map(float, own)) for own in columns.pop("scores")) or ((),) * count
        steps = Steps(**{name: tuple(values) for name, values in columns.items()}, scores=scores)
        if {len(getattr(steps, item.name)) for item in fields(steps)} != {count}:
            raise ValueError("its columns differ in length")
        answer = Answer(
            tuple(data["token_ids"]),
            float(data["first_seconds"]),
            float(data["seconds"]),
            str(data["finish_reason"]),
            steps,
            {name: (int(drafts), int(accepted)) for name, (drafts, accepted) in data["drafts_by"].items()},
        )
        own = {item.name: data[item.name] for item in fields(cls) if item.name != "answer"}
        return cls(**own, answer=answer)


@dataclass
class Results:
    """Runs with the same settings.

    Args:
        answers: answers by the name of the machine.
        seen: identifies each answer that was read from a file.
    """

    runs: list[BenchRun] = field(default_factory=list)
    answers: dict[str, list[Answered]] = field(default_factory=dict)
    seen: set[tuple[Any, ...]] = field(default_factory=set)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the runs."""
        return self.runs[0].settings

    @property
    def lines(self) -> dict[str, Mapping[str, Any]]:
        """Lines of the table, in the order in which they first occur."""
        found: dict[str, Mapping[str, Any]] = {}
        for run in self.runs:
            for name, facts in run.lines.items():
                found.setdefault(name, facts)
        return found

    def done(self, machine: str) -> set[tuple[str, str, int, int]]:
        """Keys of the answers of a machine."""
        return {answer.key for answer in self.answers.get(machine, ())}


def read_results(paths: Sequence[Path]) -> Results:
    """Read files of one or several machines as one.

    Raises:
        InvalidResults: a file is not valid, has no answers, or has other settings than the files before it.
    """
    results = Results()
    for path in paths:
        _read(path, results)
        if not any(results.answers.values()):
            raise InvalidResults(path=str(path), reason="it has no answers")
    return results


class ResultFile:
    """A file to which the answers of a run are appended. Answers of an earlier run of the same settings are kept.

    Args:
        path: path of the file, which may exist.

    Raises:
        InvalidResults: the file is not a file of results, or was written with other settings.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, run: BenchRun) -> None:
        self.path = path
        self.results = Results()
        if path.exists():
            _drop_partial_line(path)
            _read(path, self.results)
        _add_run(path, self.results, run)
        self._machine = str(run.machine["name"])
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._write({"kind": "run", "format": FORMAT, **asdict(run)})

    def add(self, answered: Answered) -> None:
        """Append an answer. It is in the file when this method returns."""
        self.results.answers.setdefault(self._machine, []).append(answered)
        self._write(answered.as_json())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, data: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(data, separators=(",", ":")) + "\n")
        self._file.flush()


def _drop_partial_line(path: Path) -> None:
    """Remove a last line that a killed run has not finished."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)


def _read(path: Path, results: Results) -> None:
    def refuse(reason: str) -> InvalidResults:
        return InvalidResults(path=str(path), reason=reason)

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(f"it cannot be read ({error})") from error
    machine = None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line:
            continue
        try:
            data = json.loads(line)
            if data["kind"] == "run":
                if data["format"] != FORMAT:
                    raise refuse(f"it is of format {data['format']}, and only {FORMAT} is read")
                run = BenchRun(data["settings"], data["lines"], data["machine"])
                machine = str(run.machine["name"])
                _add_run(path, results, run)
            else:
                if machine is None:
                    raise ValueError("no line of kind 'run' is before it")
                answered = Answered.from_json(data)
                identity = (machine, answered.key, answered.answer.seconds)
                # A file that is given twice adds nothing.
                if identity not in results.seen:
                    results.seen.add(identity)
                    results.answers.setdefault(machine, []).append(answered)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, InvalidResults):
                raise
            raise refuse(f"line {number} is not of a file of results ({type(error).__name__}: {error})") from error


def _add_run(path: Path, results: Results, run: BenchRun) -> None:
    if results.runs:
        _compare(path, "settings", results.settings, run.settings)
        for name in results.lines.keys() & run.lines.keys():
            _compare(path, f"line {name!r}", results.lines[name], run.lines[name])
    results.runs.append(run)


def _compare(path: Path, what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    different = _different(before, now)
    if different:
        shown = "; ".join(f"{name} is {before.get(name)!r} and {now.get(name)!r}" for name in different)
        raise InvalidResults(
            path=str(path), reason=f"its {what} differ: {shown}; use another file, or the same options"
        )


def _different(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[str]:
    # As JSON has them: a tuple and a list are equal.
    plain = json.loads(json.dumps([before, now]))
    return [name for name in {**before, **now} if plain[0].get(name) != plain[1].get(name)]
