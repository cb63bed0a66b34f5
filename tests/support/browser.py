"""Headless Chromium, by way of selenium."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
_FLAGS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
]
DESKTOP, PHONE = (1280, 800), (390, 844)
SECONDS = 60


class Browser:
    """One window, around selenium's ``driver``."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def show(self, size: tuple[int, int], *, scale: int = 2, dark: bool = False) -> None:
        """Take the size of a screen in CSS pixels, each of ``scale`` by ``scale`` pixels, and its colour scheme."""
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": size == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def open(self, address: str, size: tuple[int, int] = DESKTOP, *, dark: bool = False) -> None:
        self.show(size, dark=dark)
        self.driver.get(address)

    def run(self, script: str, *arguments: Any) -> Any:
        """What ``script``, the body of a function of ``arguments``, returns."""
        return self.driver.execute_script(script, *arguments)

    def wait_for(self, condition: str) -> None:
        """Until the expression ``condition`` is true."""
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, SECONDS, 0.05).until(lambda _: self.run(f"return Boolean({condition})"), condition)

    def type(self, selector: str, text: str) -> None:
        self.driver.find_element("css selector", selector).send_keys(text)

    def click(self, selector: str) -> None:
        self.driver.find_element("css selector", selector).click()

    def messages(self) -> list[str]:
        """What the console has shown since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def screenshot(self, path: Path) -> None:
        assert self.driver.save_screenshot(str(path))


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A window, with a new profile. A test without the programs is skipped."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs the programs chromium and chromedriver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in _FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
