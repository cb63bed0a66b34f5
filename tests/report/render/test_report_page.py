"""The report as one HTML file: what is in it, and how it works in a browser."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from speccompile.report.render.page import packed, page
from support.reports import tiny_report, tree_report, with_layers

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
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
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs Chromium and its driver (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    (folder / "tiny.html").write_text(page(tiny_report()))
    (folder / "tree.html").write_text(page(tree_report()))
    (folder / "deep.html").write_text(page(with_layers(tiny_report(), 64)))
    return folder


def opened(browser: Any, path: Path, address: str = "") -> Any:
    """The browser with the page; ``address`` is what is chosen in it."""
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get("about:blank")
    browser.get(f"{path.as_uri()}#{address}")
    WebDriverWait(browser, 20).until(
        lambda driver: driver.execute_script("return document.getElementById('app').dataset.ready")
    )
    return browser


def text_of(browser: Any, selector: str) -> str:
    return str(browser.find_element("css selector", selector).text)


def errors(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def chosen(browser: Any, selector: str, text: str) -> None:
    """Click the element whose text begins so."""
    items = browser.find_elements("css selector", selector)
    item = next(item for item in items if item.text.startswith(text))
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", item)
    item.click()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["tiny", "tree"])
def test_it_fits_and_reports_no_error(browser: Any, folder: Path, name: str, width: int, scheme: str) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    opened(browser, folder / f"{name}.html")
    assert tiny_report().verdict[0][:10] in text_of(browser, "#verdict")
    # The page itself does not scroll sideways: wide tables and graphs do, each by itself.
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    size = browser.execute_script("return document.documentElement.scrollHeight")
    shot = {"captureBeyondViewport": True, "clip": {"x": 0, "y": 0, "width": width, "height": size, "scale": 1}}
    image = browser.execute_cdp_cmd("Page.captureScreenshot", shot)["data"]
    assert len(image) > 50_000
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    assert not errors(browser)
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_why_a_tier_is_slow_is_two_clicks_away(browser: Any, folder: Path) -> None:
    opened(browser, folder / "tiny.html", "tier=K%3D0")
    chosen(browser, ".waterfall .head", "K=3")
    tier = tiny_report().tiers[-1]
    assert tier.explanation[0] in text_of(browser, "#why")
    chosen(browser, "#why td button", "attention")
    assert "attention" in text_of(browser, ".columns.why")
    assert "tier=K%3D3" in browser.current_url and "region=attention" in browser.current_url
    assert not errors(browser)


def test_what_a_pass_changed_is_two_clicks_away(browser: Any, folder: Path) -> None:
    opened(browser, folder / "tiny.html")
    chosen(browser, "nav .links a", "Step")
    chosen(browser, ".passes button", "commit")
    stage = next(stage for stage in tiny_report().tiers[-1].program.stages if stage.name == "commit")
    assert stage.summary in text_of(browser, "#code")
    shown = browser.find_elements("css selector", "#code .add")
    added = [line for line in stage.diff.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert [item.get_attribute("textContent") for item in shown] == added
    assert browser.find_elements("css selector", ".graph .box.added")
    assert not errors(browser)


def test_the_keyboard_opens_a_region_and_shows_a_call(browser: Any, folder: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(browser, folder / "tiny.html")
    region = browser.find_element("css selector", '[data-box="region:choose"]')
    before = len(browser.find_elements("css selector", ".graph [data-box]"))
    browser.execute_script("arguments[0].focus()", region)
    region.send_keys(Keys.ENTER)
    boxes = browser.find_elements("css selector", '.graph [data-box^="call:"]')
    assert len(boxes) > 0 and len(browser.find_elements("css selector", ".graph [data-box]")) > before
    browser.execute_script("arguments[0].focus()", boxes[0])
    boxes[0].send_keys(Keys.ARROW_DOWN)
    assert browser.switch_to.active_element.get_attribute("data-box") != boxes[0].get_attribute("data-box")
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert "added by" in text_of(browser, "#step .card")
    assert browser.find_elements("css selector", "#code .target")
    # Every control can be reached: links, buttons, boxes.
    unreachable = browser.execute_script(
        "return [...document.querySelectorAll('[role=button], a')].filter(item => item.tabIndex < 0).length"
    )
    assert unreachable == 0 and not errors(browser)


def test_64_layers_are_folded_until_they_are_opened(browser: Any, folder: Path) -> None:
    opened(browser, folder / "deep.html", "program=model&stage=capture")
    assert len(browser.find_elements("css selector", ".graph [data-box]")) < 40
    opened(browser, folder / "deep.html")
    layers = browser.find_element("css selector", '[data-box="region:layers"]')
    assert "64 x decoder_layer" in layers.text
    layers.click()
    assert len(browser.find_elements("css selector", '.graph [data-box^="call:"]')) == 64
    assert not errors(browser)


def test_a_tree_is_drawn(browser: Any, folder: Path) -> None:
    opened(browser, folder / "tree.html")
    assert len(browser.find_elements("css selector", "#tree circle")) == 6
