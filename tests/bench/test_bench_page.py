"""The page of a comparison: one file that loads nothing, in a browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from speccompile.bench.answers import Answer, Steps
from speccompile.bench.method_names import PLAIN, TRANSFORMERS
from speccompile.bench.page import bench_page
from speccompile.bench.results import Answered, BenchRun, Results
from speccompile.bench.summary import BenchSummary, summarize
from support.browser import Browser, browser

SETTINGS = {"model": "tiny", "temperature": 0.0, "weights": "same", "kv": "same", "options": {}}
LINES = {PLAIN: {"mode": "none"}, "ngram K=3": {"mode": "ngram"}, "suffix+head K=3": {"mode": ["suffix", "head"]}}
RUN = BenchRun(SETTINGS, {**LINES, TRANSFORMERS: {}}, {"name": "a processor", "cores": 2, "versions": {"torch": "2"}})


def answered(line: str, prompt: str, category: str, factor: float) -> Answered:
    count = {PLAIN: 12, TRANSFORMERS: 0}.get(line, 6)
    depth = 0 if line == PLAIN else 3
    accepted = tuple(0 if line == PLAIN else index % 3 for index in range(count))
    emitted = tuple(number + 1 for number in accepted)
    scores = tuple((0.8, 0.5, 0.2) if "head" in line else () for _ in range(count))
    steps = Steps((str(depth),) * count, (depth,) * count, accepted, emitted, (10.0,) * count, scores)
    drafts = {"suffix": (9, 3), "head": (9, 3)} if "head" in line else {}
    seconds = 0.1 + factor * {PLAIN: 0.12, TRANSFORMERS: 0.2}.get(line, 0.07)
    return Answered(line, prompt, category, 0, 0, 505, Answer(tuple(range(13)), 0.1, seconds, "eos", steps, drafts))


def summary() -> BenchSummary:
    answers = [
        answered(line, f"{category} {number}", category, 1 + 0.1 * number)
        for line in RUN.lines
        for category in ("writing", "qa")
        for number in range(3)
    ]
    other = replace(RUN, machine={"name": "another processor"})
    return summarize(Results([RUN, other], {"a processor": answers, "another processor": answers[:12]}))


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as window:
        yield window


def test_the_file_loads_nothing_and_is_readable_without_scripts() -> None:
    text = bench_page(summary())
    assert "default-src 'none'" in text and not re.findall(r"<(?:link|script|img)[^>]*(?:src|href)=", text)
    hidden = text[text.index("<noscript>") : text.index("</noscript>")]
    assert "suffix+head K=3" in hidden and "acceptance" in hidden


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (480, True)])
def test_it_shows_every_figure_without_an_error(window: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    path = tmp_path / "page.html"
    path.write_text(bench_page(summary()))
    window.show((width, 900), scale=1, dark=dark)
    window.driver.get(path.as_uri())
    window.wait_for("document.getElementById('app').dataset.ready")
    assert window.run("return document.documentElement.scrollWidth") <= width
    sections = window.run("return [...document.querySelectorAll('section')].map((section) => section.id)")
    assert sections == ["positions", "categories", "contexts", "tiers", "calibration", "settings"]
    text = str(window.driver.find_element("css selector", "main").text)
    for shown in ("all machines", "K=0 is 1.67x as fast as transformers' generate", "yes, 6 of 6", "0 to 511"):
        assert shown in text
    buttons = window.driver.find_elements("css selector", "nav .tiers button")
    assert [button.text for button in buttons] == ["a processor", "another processor", "all machines"]
    window.run("arguments[0].click()", buttons[1])
    window.wait_for("document.querySelector('header.top').textContent.includes('another processor')")
    assert "suffix+head" not in str(window.driver.find_element("css selector", "main").text)
    assert not [entry for entry in window.driver.get_log("browser") if entry["level"] == "SEVERE"]
    window.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
