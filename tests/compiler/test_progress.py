"""What a wrap reports while it builds, and what can be built beforehand."""

from __future__ import annotations

import logging
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import speccompile
from speccompile import Speculator
from speccompile.errors import CaptureError, Degraded, InvalidOption
from speccompile.lowering import kernels
from support.errors import raises
from support.tiny import random_prompt, tiny_llama

PROMPT = random_prompt(9)


class Reports:
    """What was reported, in order; parts that have begun and not ended are ``open``."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.open: list[str] = []

    def __call__(self, description: str, begins: bool) -> None:
        if begins:
            self.begun.append(description)
            self.open.append(description)
        else:
            assert self.open.pop() == description


def wrapped(**options: Any) -> Speculator:
    given: dict[str, Any] = {"mode": "none", "tiers": (0,), "max_len": 32, "backend": "eager"} | options
    return speccompile.wrap(tiny_llama(), **given)


def test_a_wrap_and_kinds_built_later_are_reported_from_any_thread() -> None:
    reports = Reports()
    with wrapped(progress=reports) as spec:
        assert "run the passes" in reports.begun and not reports.open
        before = len(reports.begun)
        draw = threading.Thread(target=lambda: spec.generate(torch.tensor([PROMPT]), max_new_tokens=2, do_sample=True))
        draw.start()
        draw.join()
        assert reports.begun[before:] == ["build the sampled steps"] and not reports.open


def test_parts_of_a_wrap_that_fails_are_reported_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    error = CaptureError("not this one")

    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr("speccompile.compiler.attempts.check_capture", fails)
    reports = Reports()
    with pytest.raises(CaptureError) as caught:
        wrapped(progress=reports)
    assert caught.value is error
    assert reports.begun[-1] == "check the captured graph against the model" and not reports.open


def test_the_log_says_what_is_built_and_its_seconds(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "speccompile"):
        wrapped().close()
    lines = [record.getMessage() for record in caplog.records if record.name == "speccompile"]
    assert any(re.fullmatch(r"run the passes: \d+\.\d\d s", line) for line in lines)
    assert re.fullmatch(r"wrapped in \d+\.\d\d s: <Speculator of LlamaForCausalLM: .*>", lines[-1])


def test_progress_has_to_be_callable() -> None:
    with raises(InvalidOption, name="progress", value=3, reason=re.compile("use a function")):
        wrapped(progress=3)


def test_what_is_prepared_is_not_built_when_a_request_comes() -> None:
    reports = Reports()
    with wrapped(progress=reports, max_batch=2) as spec:
        spec.prepare(sampling=True, mixed=True)
        assert {"build the sampled steps", "build the mixed sampled steps", "build the mixed greedy steps"} <= set(
            reports.begun
        )
        before = len(reports.begun)
        spec.engine.submit(PROMPT, max_new_tokens=2).result()
        spec.engine.submit(PROMPT, max_new_tokens=2, do_sample=True).result()
        spec.generate(torch.tensor([PROMPT]), max_new_tokens=2, do_sample=True)
        spec.prepare(sampling=True, mixed=True)
        assert reports.begun[before:] == []


@pytest.mark.parametrize("option", ["sampling", "mixed"])
def test_prepare_takes_true_and_false(option: str) -> None:
    with wrapped() as spec, raises(InvalidOption, where="prepare", name=option, value=1):
        spec.prepare(**{option: 1})


# --- what works with less ------------------------------------------------------------------------


def test_without_a_compiler_a_wrap_warns_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.warns(Degraded, match=r"no C\+\+ compiler .* Install one") as warned, wrapped(backend="auto") as spec:
        assert spec.backend.name == "eager"
    assert [Path(warning.filename) for warning in warned] == [Path(__file__)]


def test_ops_that_cannot_be_built_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "load_cpu_ops", lambda *_: "the C++ compiler failed: no disk")
    with pytest.warns(Degraded, match=r"the C\+\+ compiler failed: no disk.*torch's own linears"):
        assert not kernels._PendingKernels(True, "ours").settled().native
