"""Headless Chromium, by way of its driver (W3C WebDriver over HTTP)."""

from __future__ import annotations

import base64
import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs the programs chromium and chromedriver (Debian: chromium, chromium-driver)"
)
_FLAGS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
]
DESKTOP, PHONE = (1280, 800), (390, 844)
_SECONDS = 60


class Browser:
    """One window.

    Args:
        session: the address of a session of the driver.
    """

    def __init__(self, session: str) -> None:
        self._client = httpx2.Client(base_url=session, timeout=_SECONDS)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self._client.request(method, path, json=body if method == "POST" else None)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value

    def open(self, address: str, size: tuple[int, int] = DESKTOP, *, dark: bool = False) -> None:
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": size == PHONE}
        self._cdp("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._cdp("Emulation.setEmulatedMedia", {"features": [scheme]})
        self._call("POST", "/url", {"url": address})

    def _cdp(self, command: str, arguments: dict[str, Any]) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": arguments})

    def run(self, script: str) -> Any:
        """What ``script``, the body of a function, returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": []})

    def wait_for(self, condition: str) -> None:
        """Until the expression ``condition`` is true."""
        until = time.monotonic() + _SECONDS
        while not self.run(f"return Boolean({condition})"):
            assert time.monotonic() < until, condition
            time.sleep(0.05)

    def type(self, selector: str, text: str) -> None:
        element = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{next(iter(element.values()))}/value", {"text": text})

    def click(self, selector: str) -> None:
        element = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{next(iter(element.values()))}/click", {})

    def messages(self) -> list[str]:
        """What the console has shown since the last call."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A window whose profile lies in ``folder``."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    driver = subprocess.Popen([str(DRIVER), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address, session = f"http://127.0.0.1:{port}", ""
    try:
        _wait_for_driver(address)
        chrome = {"binary": CHROMIUM, "args": [*_FLAGS, f"--user-data-dir={folder}"]}
        capabilities = {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
        body = {"capabilities": {"alwaysMatch": {"browserName": "chrome", **capabilities}}}
        answer = httpx2.post(f"{address}/session", json=body, timeout=_SECONDS).json()["value"]
        assert "sessionId" in answer, answer
        session = f"{address}/session/{answer['sessionId']}"
        yield Browser(session)
    finally:
        if session:
            httpx2.delete(session, timeout=_SECONDS)
        driver.terminate()
        driver.wait(_SECONDS)


def _wait_for_driver(address: str) -> None:
    until = time.monotonic() + _SECONDS
    while True:
        try:
            if httpx2.get(f"{address}/status").json()["value"]["ready"]:
                return
        except httpx2.TransportError:
            pass
        assert time.monotonic() < until, "the driver does not start"
        time.sleep(0.05)
