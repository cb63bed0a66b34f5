"""The report as one HTML file: what is in it, and how it works in a browser."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from speccompile.report.render.page import packed, page
from support.browser import Browser, browser
from support.reports import tiny_report, tree_report, with_layers

ASSETS = files("speccompile.report.render") / "assets"
WIDTHS = (1280, 480)


# --- the file ------------------------------------------------------------------------------------


def test_the_file_loads_nothing() -> None:
    text = page(tiny_report())
    assert "default-src 'none'" in text
    assert not re.findall(r"<(?:link|script|img)[^>]*(?:src|href)=", text)
    own = [path for path in ASSETS.iterdir() if path.is_file()]
    assert not [path.name for path in own if re.search(r"https?://", path.read_text())]


def test_the_code_of_stages_is_packed_and_unpacked() -> None:
    report = tiny_report()
    data = json.loads(gzip.decompress(packed(report)))
    runs = data["report"]["tiers"][-1]["program"]["stages"][-1]["python"]
    pairs = zip(runs[::2], runs[1::2], strict=True)
    lines = [line for first, count in pairs for line in data["lines"][first : first + count]]
    assert "\n".join(lines) == report.tiers[-1].program.stages[-1].python


def test_every_library_in_the_page_has_its_licence() -> None:
    licences = (ASSETS / "vendor" / "LICENSES.md").read_text()
    for path in (ASSETS / "vendor").iterdir():
        assert path.name == "LICENSES.md" or f"| {path.name} |" in licences


def test_without_scripts_the_verdict_is_there() -> None:
    text = page(tiny_report())
    assert tiny_report().verdict[0] in text[text.index("<noscript>") : text.index("</noscript>")]


# --- a browser -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as window:
        yield window


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    (folder / "tiny.html").write_text(page(tiny_report()))
    (folder / "tree.html").write_text(page(tree_report()))
    (folder / "deep.html").write_text(page(with_layers(tiny_report(), 64)))
    return folder


def opened(window: Browser, path: Path, address: str = "") -> None:
    """Open the page; ``address`` is what is chosen in it."""
    window.driver.get("about:blank")
    window.driver.get(f"{path.as_uri()}#{address}")
    window.wait_for("document.getElementById('app').dataset.ready")


def text_of(window: Browser, selector: str) -> str:
    return str(window.driver.find_element("css selector", selector).text)


def errors(window: Browser) -> list[str]:
    return [entry["message"] for entry in window.driver.get_log("browser") if entry["level"] == "SEVERE"]


def chosen(window: Browser, selector: str, text: str) -> None:
    """Click the element whose text begins so."""
    items = window.driver.find_elements("css selector", selector)
    item = next(item for item in items if item.text.startswith(text))
    window.run("arguments[0].scrollIntoView({block: 'center'})", item)
    item.click()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["tiny", "tree"])
def test_it_fits_and_reports_no_error(window: Browser, folder: Path, name: str, width: int, scheme: str) -> None:
    window.show((width, 900), scale=1, dark=scheme == "dark")
    opened(window, folder / f"{name}.html")
    report = tiny_report() if name == "tiny" else tree_report()
    assert report.verdict[0] in text_of(window, "#verdict")
    # The page itself does not scroll sideways: wide tables and graphs do, each by itself.
    assert window.run("return document.documentElement.scrollWidth") <= width
    size = window.run("return document.documentElement.scrollHeight")
    shot = {"captureBeyondViewport": True, "clip": {"x": 0, "y": 0, "width": width, "height": size, "scale": 1}}
    image = window.driver.execute_cdp_cmd("Page.captureScreenshot", shot)["data"]
    assert len(image) > 50_000
    background = window.run("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    assert not errors(window)
    window.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_why_a_tier_is_slow_is_two_clicks_away(window: Browser, folder: Path) -> None:
    opened(window, folder / "tiny.html", "tier=K%3D0")
    chosen(window, ".waterfall .head", "K=3")
    tier = tiny_report().tiers[-1]
    assert tier.explanation[0] in text_of(window, "#why")
    chosen(window, "#why td button", "attention")
    assert "attention" in text_of(window, ".columns.why")
    assert "tier=K%3D3" in window.driver.current_url and "region=attention" in window.driver.current_url
    assert not errors(window)


def test_what_a_pass_changed_is_two_clicks_away(window: Browser, folder: Path) -> None:
    opened(window, folder / "tiny.html")
    chosen(window, "nav .links a", "Step")
    chosen(window, ".passes button", "commit")
    stage = next(stage for stage in tiny_report().tiers[-1].program.stages if stage.name == "commit")
    assert stage.summary in text_of(window, "#code")
    shown = window.driver.find_elements("css selector", "#code .add")
    added = [line for line in stage.diff.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert [item.get_attribute("textContent") for item in shown] == added
    assert window.driver.find_elements("css selector", ".graph .box.added")
    assert not errors(window)


def test_the_keyboard_opens_a_region_and_shows_a_call(window: Browser, folder: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(window, folder / "tiny.html")
    region = window.driver.find_element("css selector", '[data-box="region:choose"]')
    before = len(window.driver.find_elements("css selector", ".graph [data-box]"))
    window.run("arguments[0].focus()", region)
    region.send_keys(Keys.ENTER)
    boxes = window.driver.find_elements("css selector", '.graph [data-box^="call:"]')
    assert len(boxes) > 0 and len(window.driver.find_elements("css selector", ".graph [data-box]")) > before
    window.run("arguments[0].focus()", boxes[0])
    boxes[0].send_keys(Keys.ARROW_DOWN)
    assert window.driver.switch_to.active_element.get_attribute("data-box") != boxes[0].get_attribute("data-box")
    window.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert "added by" in text_of(window, "#step .card")
    assert window.driver.find_elements("css selector", "#code .target")
    # Every control can be reached: links, buttons, boxes.
    unreachable = window.run(
        "return [...document.querySelectorAll('[role=button], a')].filter(item => item.tabIndex < 0).length"
    )
    assert unreachable == 0 and not errors(window)


def test_64_layers_are_folded_until_they_are_opened(window: Browser, folder: Path) -> None:
    opened(window, folder / "deep.html", "program=model&stage=capture")
    assert len(window.driver.find_elements("css selector", ".graph [data-box]")) < 40
    opened(window, folder / "deep.html")
    layers = window.driver.find_element("css selector", '[data-box="region:layers"]')
    assert "64 x decoder_layer" in layers.text
    layers.click()
    assert len(window.driver.find_elements("css selector", '.graph [data-box^="call:"]')) == 64
    assert not errors(window)


def test_a_tree_is_drawn(window: Browser, folder: Path) -> None:
    opened(window, folder / "tree.html")
    assert len(window.driver.find_elements("css selector", "#tree circle")) == 6
