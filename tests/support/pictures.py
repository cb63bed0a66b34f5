"""Pictures of pages, at two widths, light and dark; ``build/screenshots/`` keeps them."""

from __future__ import annotations

import base64
import re

from support.browser import Browser
from support.pages import ROOT

WIDTHS = (1280, 480)
SCHEMES = ("light", "dark")
FOLDER = ROOT / "build" / "screenshots"


def photographed(window: Browser, name: str, width: int, scheme: str) -> None:
    """Keeps a picture of the whole page that is open, after checks: it fits, it has the colours of ``scheme``, and the
    console has no error."""
    assert window.run("return document.documentElement.scrollWidth") <= width
    background = window.run("return getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in re.findall(r"\d+", background)[:3]) / 3
    assert (brightness > 200) == (scheme == "light"), background
    height = window.run("return document.documentElement.scrollHeight")
    shot = {"captureBeyondViewport": True, "clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}}
    picture = base64.b64decode(window.driver.execute_cdp_cmd("Page.captureScreenshot", shot)["data"])
    assert len(picture) > 30_000
    assert not [entry for entry in window.driver.get_log("browser") if entry["level"] == "SEVERE"]
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}-{width}-{scheme}.png").write_bytes(picture)
