"""The page at ``/``: it needs nothing but the server."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from speccompile.serve.app import PAGE
from support import serving
from support.serving import Client

CHROMIUM = shutil.which("chromium")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


def test_the_page_loads_nothing_from_elsewhere(client: Client) -> None:
    answer = client.get("/")
    assert answer.headers["content-security-policy"].startswith("default-src 'self'")
    links = re.findall(r'(?:src|href)="([^"]*)"', answer.text)
    assert links and all(link.startswith("page/") for link in links)
    for link in links:
        assert client.get(f"/{link}").status_code == 200
    for path in PAGE.iterdir():
        outside = set(re.findall(r"https?://[^\s\"')]*", path.read_text())) - {"http://www.w3.org/2000/svg"}
        assert not outside, path


def test_scripts_look_for_elements_that_are_there() -> None:
    ids = set(re.findall(r'id="([^"]*)"', (PAGE / "index.html").read_text()))
    for script in PAGE.glob("*.js"):
        text = script.read_text()
        wanted = set(re.findall(r'byId\("([^"]*)"\)', text)) | set(re.findall(r'draw\("([^"]*)"', text))
        assert wanted and wanted <= ids


def test_the_live_state_shows_slots_and_counters(client: Client) -> None:
    held = client.service.engine.submit([5, 6, 7], max_new_tokens=50)
    try:
        while not held.new_tokens:
            client.service.engine.step()
        now = client.get("/live").json()
    finally:
        held.cancel()
    (slot,) = [slot for slot in now["slots"] if slot is not None]
    assert slot["prompt_tokens"] == 3 and slot["new_tokens"] >= 1 and slot["max_new_tokens"] == 50
    assert now["tiers"] == [0, 3] and now["tier"] in now["tiers"] and now["drafter"] == "ngram"
    assert client.get("/live").json()["slots"] == [None] * serving.SLOTS


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_what_the_engine_does(client: Client, tmp_path: Path) -> None:
    with serving.listening(client.app, lifespan="off") as address:
        command = [
            str(CHROMIUM),
            *FLAGS,
            f"--user-data-dir={tmp_path}",
            "--virtual-time-budget=3000",
            "--dump-dom",
            address,
        ]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    for text in (">tiny<", "3: free", "drafted by ngram, accepted", "Ask the model something"):
        assert text in shown
