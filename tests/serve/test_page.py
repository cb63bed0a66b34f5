"""The page at ``/``: it needs nothing but the server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from speccompile import Speculator
from speccompile.serve.app import PAGE
from support import serving
from support.browser import DESKTOP, PHONE, Browser, browser
from support.serving import Client


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
    assert now["tiers"] == [0, 3] and now["tier"] in now["tiers"] and now["drafters"] == ["prediction", "ngram"]
    assert client.get("/live").json()["slots"] == [None] * serving.SLOTS


@pytest.fixture(scope="module")
def address(client: Client) -> Iterator[str]:
    with serving.listening(client.service, lifespan="off") as address:
        yield address


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as window:
        yield window


def ask(window: Browser, text: str) -> None:
    window.type("#input", text)
    window.click("#send")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_an_answer_is_shaded_by_its_drafters(
    address: str, window: Browser, client: Client, size: tuple[int, int], dark: bool, tmp_path: Path
) -> None:
    window.open(address, size, dark=dark)
    window.wait_for("document.getElementById('model').textContent")
    assert window.run("return document.getElementById('model').textContent") == "tiny · prediction + ngram"
    window.run("document.getElementById('max-tokens').value = 60")
    ask(window, "the end of the end of the")
    window.wait_for("document.querySelector('.facts')")
    body = {"messages": [{"role": "user", "content": "the end of the end of the"}], "max_tokens": 60, "temperature": 0}
    choice = client.post("/v1/chat/completions", body | {"return_token_sources": True}).json()["choices"][0]
    assert window.run("return document.querySelector('.assistant .text').textContent") == choice["message"]["content"]
    assert window.run("return document.querySelectorAll('.assistant .token.drafted').length") > 0
    titles = window.run("return [...document.querySelectorAll('.drafted.token')].map((item) => item.title)")
    assert set(titles) == {"drafted by ngram, accepted"}
    emitted = window.run(
        "return [...document.querySelectorAll('.steps i')].map((bar) => parseInt(bar.title)).reduce((a, b) => a + b)"
    )
    assert emitted == len(choice["token_sources"])
    assert "acceptance length" in window.run("return document.querySelector('.facts').textContent")
    # Nothing is wider than the window, and the field is within it.
    assert window.run("return document.documentElement.scrollWidth") <= size[0]
    assert window.run("return document.getElementById('form').getBoundingClientRect().bottom") <= size[1]
    colour = window.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", colour))) < 200) == dark
    window.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    assert window.messages() == []


def test_a_phone_shows_the_engine_in_place_of_the_chat(address: str, window: Browser) -> None:
    window.open(address, PHONE)
    shown = "return ['panel', 'form'].map((id) => document.getElementById(id).checkVisibility())"
    assert window.run(shown) == [False, True]
    window.click("#panel-toggle")
    assert window.run(shown) == [True, False]
    window.wait_for("document.getElementById('slots').children.length === 3")
    window.click("#panel-toggle")
    assert window.run(shown) == [False, True]


def test_an_answer_can_be_stopped_and_a_fault_is_shown(address: str, window: Browser, client: Client) -> None:
    window.open(address)
    engine = client.service.engine
    # All slots are taken, so the answer does not begin before it is stopped.
    held = [engine.submit([5, 6], max_new_tokens=200) for _ in range(serving.SLOTS)]
    ask(window, "the end")
    window.wait_for("!document.getElementById('stop').hidden")
    window.click("#stop")
    window.wait_for("document.getElementById('stop').hidden")
    for request in held:
        request.cancel()
    window.run("document.getElementById('temperature').value = 9")
    ask(window, "the end")
    window.wait_for("document.querySelector('.error')")
    assert "temperature" in window.run("return document.querySelector('.error').textContent")
    (message,) = window.messages()
    assert "400 (Bad Request)" in message
    window.click("#clear")
    assert window.run("return document.getElementById('empty').checkVisibility()")


def test_a_key_is_asked_for(client: Client, spec: Speculator, window: Browser) -> None:
    service = serving.service(spec, api_key="secret")
    with serving.listening(service, lifespan="off") as address:
        window.open(address)
        window.wait_for("!document.getElementById('key-label').hidden")
        window.type("#key", "secret\n")
        window.wait_for("document.getElementById('model').textContent")
    service.guides.close()
    window.messages()
