"""Reports of SmolLM2 in a browser: at two widths, light and dark. ``build/screenshots/`` keeps the pictures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import speccompile
from speccompile import Tree
from speccompile.cli.models import encode
from speccompile.cli.prompts import BUILT_IN
from speccompile.report.names import short_names
from support.browser import Browser, browser
from support.pages import ROOT
from support.pictures import SCHEMES, WIDTHS, photographed

HEAD = str(ROOT / "heads" / "smollm2-135m-instruct")
TREE = Tree.static([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)])
#: The arguments of ``wrap`` for each report.
REPORTS: dict[str, dict[str, Any]] = {
    "ngram": {"mode": "ngram", "tiers": (0, 3, 7)},
    "head": {"mode": "eagle3_one_model", "draft": HEAD, "tiers": (0, 3, TREE)},
}
#: What is seen: the name of the picture, the report, and the tier that is chosen in it.
VIEWS: tuple[tuple[str, str, int], ...] = (("ngram", "ngram", 7), ("head", "head", 3), ("tree", "head", TREE))


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as window:
        yield window


@pytest.fixture(scope="module")
def report_of(
    smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The file of a report by its name, each built once."""
    folder = tmp_path_factory.mktemp("reports")
    model, tokenizer = smollm2
    prompts = [encode(tokenizer, BUILT_IN[3].text)]

    @functools.cache
    def build(name: str) -> Path:
        with speccompile.wrap(model, max_len=256, **REPORTS[name]) as spec:
            report = spec.report(folder / f"{name}.html", prompts=prompts, max_new_tokens=16)
        assert any("acceptance length" in line for line in report.verdict), report.verdict
        return folder / f"{name}.html"

    return build


@pytest.mark.real
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("name", "report", "tier"), VIEWS, ids=[view[0] for view in VIEWS])
def test_a_report_fits_and_the_console_has_no_error(
    window: Browser, report_of: Callable[[str], Path], name: str, report: str, tier: int, width: int, scheme: str
) -> None:
    address = f"{report_of(report).as_uri()}#tier={quote(short_names([tier])[tier])}"
    window.show((width, 900), scale=1, dark=scheme == "dark")
    window.driver.get("about:blank")
    window.driver.get(address)
    window.wait_for("document.getElementById('app').dataset.ready")
    nodes = window.driver.find_elements("css selector", "#tree circle")
    assert len(nodes) == (1 + TREE if name == "tree" else 0)
    photographed(window, f"report-{name}", width, scheme)
