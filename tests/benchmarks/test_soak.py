"""The soak: it passes, and what it would not pass."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer

from benchmarks import soak, soak_jobs
from benchmarks.soak_jobs import POISON, Deliberate, Job, greedy, make_jobs, poison, random_model
from speccompile.errors import RequestFailed, UndecidedLogits


def run(**options: Any) -> int:
    with pytest.raises(typer.Exit) as caught:
        soak.main(**options)
    return caught.value.exit_code


def test_a_short_soak(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    serve = soak.Soak._serve

    def from_a_full_queue_on(self: soak.Soak) -> None:
        """However fast this machine is, a request has been refused before the first one is served."""
        while not any(job.retries for job in self.jobs):
            time.sleep(0.001)
        serve(self)

    monkeypatch.setattr(soak.Soak, "_serve", from_a_full_queue_on)
    code = run(seconds=2.0, requests=60, slots=3, max_waiting=6)
    printed = capsys.readouterr()
    assert code == 0, printed.out + printed.err
    assert "60 requests" in printed.out and "resident memory" in printed.out
    (longest,) = re.findall(r"longest queue (\d+)", printed.out)
    (full,) = re.findall(r"(\d+) times full", printed.out)
    assert int(longest) >= 6 and int(full) > 0


def test_a_wrong_text_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(*arguments: Any) -> list[Job]:
        jobs = make_jobs(*arguments)
        plain = next(job for job in jobs if job.kind == "plain")
        plain.text[-1] += 1
        return jobs

    monkeypatch.setattr(soak, "make_jobs", wrong)
    assert run(seconds=1.0, requests=10) == 1
    printed = capsys.readouterr()
    assert "text: plain" in printed.err


def test_jobs_are_of_all_kinds() -> None:
    model = random_model(0)
    poison(model)
    jobs = make_jobs(model, 200, 20.0, 8, seed=0)
    kinds = [job.kind for job in jobs]
    assert {kind: kinds.count(kind) for kind in sorted(set(kinds))} == {
        "NaN": 3,
        "cancelled": 66,
        "criterion": 3,
        "plain": 124,
        "streamer": 4,
    }
    assert {job.reader for job in jobs} == set(soak_jobs.READERS)
    assert all(0 <= job.at <= 20 and 1 <= job.fault_at <= len(job.text) <= job.most for job in jobs)
    assert [job.at for job in jobs] == sorted(job.at for job in jobs)
    for job in jobs:
        assert (POISON in job.prompt) == (job.kind == "NaN")
        assert POISON not in job.text
    # What is known of a text that goes on from another one's is what transformers says of it.
    later = next(job for job in jobs if len(job.prompt) not in (5, 27, 30, 32) and job.kind == "plain" and not job.eos)
    assert greedy(model, later.prompt, later.most)[: later.most] == later.text
    other = make_jobs(model, 200, 20.0, 8, seed=0)
    assert [job.prompt for job in other] == [job.prompt for job in jobs]


def ended(kind: str, tokens: list[int], reason: str, **changes: Any) -> dict[str, str]:
    """What is found of a job whose text is 1, 2, 3, that ended so."""
    job = Job([9], [1, 2, 3], 3, [], kind, "stream", fault_at=2)
    job.request = SimpleNamespace(finished=True, new_tokens=tokens, finish_reason=reason, error=None)  # type: ignore
    job.heard, job.read, job.read_reason = list(tokens), list(tokens), reason
    job.read_ends, job.heard_ends = 1, int(kind != "streamer")
    if reason == "error":
        job.failure = RequestFailed(reason="")
        job.failure.__cause__ = UndecidedLogits(position=1) if kind == "NaN" else Deliberate()
    for name, value in changes.items():
        setattr(job, name, value)
    return job.problems()


@pytest.mark.parametrize(
    ("kind", "tokens", "reason"),
    [
        ("plain", [1, 2, 3], "max_new_tokens"),
        ("cancelled", [1], "cancelled"),
        ("cancelled", [1, 2, 3], "max_new_tokens"),
        ("streamer", [1, 2], "error"),
        ("criterion", [1, 2], "error"),
        ("NaN", [], "error"),
    ],
)
def test_ends_that_are_right(kind: str, tokens: list[int], reason: str) -> None:
    assert ended(kind, tokens, reason) == {}
    for change, name in (
        ({"heard": [*tokens, 1]}, "doubled"),
        ({"read": [*tokens, 1]}, "doubled"),
        ({"heard_ends": 2}, "ended"),
        ({"read_ends": 2}, "ended"),
        ({"read_ends": 0}, "ended"),
        ({"read_reason": ""}, "ended"),
        ({"failure": None if reason == "error" else ValueError()}, "reason"),
        ({"failure": RequestFailed(reason="")}, "reason"),
    ):
        assert list(ended(kind, tokens, reason, **change)) == [name], change


@pytest.mark.parametrize(
    ("kind", "tokens", "reason", "name"),
    [
        ("plain", [1, 2], "max_new_tokens", "text"),
        ("plain", [1, 2, 4], "max_new_tokens", "text"),
        ("plain", [1, 2], "cancelled", "reason"),
        ("plain", [1, 2], "error", "reason"),
        ("cancelled", [1, 3], "cancelled", "text"),
        ("streamer", [1, 2, 3], "error", "text"),
        ("NaN", [0], "error", "text"),
    ],
)
def test_ends_that_are_wrong(kind: str, tokens: list[int], reason: str, name: str) -> None:
    assert name in ended(kind, tokens, reason)


def test_one_that_never_ends() -> None:
    assert list(Job([9], [1], 1, [], "plain", "stream").problems()) == ["ended"]


def test_a_poisoned_prompt_has_no_text() -> None:
    model = random_model(0)
    prompt = list(range(10))
    before = greedy(model, prompt, 8)
    poison(model)
    assert greedy(model, prompt, 8) == before
    with torch.no_grad():
        assert model(torch.tensor([[1, POISON, 2]])).logits[0, -1].isnan().all()
