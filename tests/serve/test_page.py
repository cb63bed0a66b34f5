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
    page = (PAGE / "index.html").read_text()
    text = "".join(script.read_text() for script in PAGE.glob("*.js"))
    wanted = set(re.findall(r'byId\("([^"]*)"\)', text)) | set(re.findall(r'draw\("([^"]*)"', text))
    assert wanted and wanted <= set(re.findall(r'id="([^"]*)"', page))
    assert {script.name for script in PAGE.glob("*.js")} == set(re.findall(r'src="page/([^"]*[.]js)"', page))


def test_scripts_write_no_html() -> None:
    for script in PAGE.glob("*.js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document[.]write|eval\(", script.read_text())


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


def open_page(window: Browser, address: str, size: tuple[int, int] = DESKTOP, *, dark: bool = False) -> None:
    """The page with a new chat: it keeps the one of the test before."""
    window.open(address, size, dark=dark)
    window.run("document.getElementById('clear').click(); document.getElementById('input').value = ''")


def ask(window: Browser, text: str) -> None:
    window.type("#input", text)
    window.click("#send")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_an_answer_is_shaded_by_its_drafters(
    address: str, window: Browser, client: Client, size: tuple[int, int], dark: bool, tmp_path: Path
) -> None:
    open_page(window, address, size, dark=dark)
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
    open_page(window, address, PHONE)
    shown = "return ['panel', 'form'].map((id) => document.getElementById(id).checkVisibility())"
    assert window.run(shown) == [False, True]
    window.click("#panel-toggle")
    assert window.run(shown) == [True, False]
    window.wait_for("document.getElementById('slots').children.length === 3")
    window.click("#panel-toggle")
    assert window.run(shown) == [False, True]


def test_an_answer_can_be_stopped_and_a_fault_is_shown(address: str, window: Browser, client: Client) -> None:
    open_page(window, address)
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


#: Texts, and the HTML of what is shown of them.
MARKDOWN = {
    "a **b *c*** `d*e*` ~~f~~ 2 * 3 * 4 g_h_i": (
        "<p>a <strong>b <em>c</em></strong> <code>d*e*</code> <del>f</del> 2 * 3 * 4 g_h_i</p>"
    ),
    "# A #\n\nb\n***": "<h1>A</h1><p>b</p><hr>",
    "a\n```python\nif a < b:\n    **c**\n\nd\n```\ne": (
        '<p>a</p><pre data-language="python"><code>if a &lt; b:\n    **c**\n\nd</code></pre><p>e</p>'
    ),
    "```\nnot closed": "<pre><code>not closed</code></pre>",
    "- a\n  - b\n- c\n\n2. d\n   e\n3. f": (
        '<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul><ol start="2"><li>d\ne</li><li>f</li></ol>'
    ),
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "a | b\n--|--\n1 | `2`": (
        "<table><tbody><tr><th>a</th><th>b</th></tr><tr><td>1</td><td><code>2</code></td></tr></tbody></table>"
    ),
    "[a](https://b.c/d_e_f) https://b.c/?d=1.": (
        '<p><a href="https://b.c/d_e_f" rel="noopener noreferrer" target="_blank">a</a> '
        '<a href="https://b.c/?d=1" rel="noopener noreferrer" target="_blank">https://b.c/?d=1</a>.</p>'
    ),
    # None of these adds an element or an address that runs code.
    "<img src=x onerror=alert(1)> <script>alert(1)</script>": (
        "<p>&lt;img src=x onerror=alert(1)&gt; &lt;script&gt;alert(1)&lt;/script&gt;</p>"
    ),
    "[a](javascript:alert(1)) [b](data:text/html,x) ![c](x)": (
        "<p>[a](javascript:alert(1)) [b](data:text/html,x) ![c](x)</p>"
    ),
    '```"onload="a\n</code>\n```': '<pre data-language="&quot;onload=&quot;a"><code>&lt;/code&gt;</code></pre>',
}
SHOW = """
const [text, pieces] = arguments;
const container = document.createElement("div");
const leaf = (start, end) => [document.createTextNode(text.slice(start, end))];
for (let end = pieces ? 0 : text.length; end <= text.length; end += 1) {
  showMarkdown(container, text.slice(0, end), leaf);
}
container.querySelectorAll("[data-block]").forEach((item) => item.removeAttribute("data-block"));
return container.innerHTML;
"""


def test_markdown_is_shown_as_such_and_html_as_text(address: str, window: Browser) -> None:
    open_page(window, address)
    for text, shown in MARKDOWN.items():
        assert window.run(SHOW, text, False) == shown
        # As it arrives: what is shown already never differs from what the whole would show.
        assert window.run(SHOW, text, True) == shown
    assert window.messages() == []


def test_a_mark_that_is_repeated_without_end_is_shown(address: str, window: Browser) -> None:
    open_page(window, address)
    for mark in ("*", "**a ", "> ", "* + ", "`", "[a](", "| a ", "_a_", "1. ", "\\"):
        assert window.run(SHOW, (mark * 8000)[:8000], False)


def test_a_cut_answer_says_so_and_a_reload_keeps_the_chat(address: str, window: Browser) -> None:
    open_page(window, address)
    window.run("document.getElementById('max-tokens').value = 7")
    ask(window, "the end of the end")
    window.wait_for("document.querySelector('.note')")
    assert window.run("return document.querySelector('.note').textContent").startswith("Cut after 7 tokens.")
    window.type("#input", "not sent yet")
    shown = (
        "return [document.getElementById('input').value,"
        " ...[...document.querySelectorAll('#messages > :not(#empty)')].map((item) => item.outerHTML)]"
    )
    before = window.run(shown)
    window.driver.refresh()
    window.wait_for("document.querySelector('.note')")
    assert window.run(shown) == before and before[0] == "not sent yet"
    messages = window.run("return messagesOfConversation()")
    assert [message["role"] for message in messages] == ["user", "assistant"]


#: A connection that breaks in the middle of an answer.
BREAKS = """
const chunk = {choices: [{delta: {content: "ab"}, token_sources: [{bytes: [97, 98], drafted_by: null}]}]};
window.fetch = async () => new Response(`data: ${JSON.stringify(chunk)}\\n\\n`);
"""


def test_a_server_that_is_gone_is_said_and_no_text_is_lost(client: Client, window: Browser) -> None:
    with serving.listening(client.service, lifespan="off") as address:
        open_page(window, address)
        window.wait_for("document.getElementById('model').textContent")
    ask(window, "are you there?")
    window.wait_for("document.querySelector('.error')")
    assert "does not answer" in window.run("return document.querySelector('.error').textContent")
    assert window.run("return document.getElementById('input').value") == "are you there?"
    assert window.run("return conversation.length") == 0
    window.wait_for("document.getElementById('status').textContent === 'server is gone'")
    window.run(BREAKS)
    window.click("#send")
    window.wait_for("document.querySelector('.note')")
    assert window.run("return document.querySelector('.assistant .text').textContent") == "ab"
    assert "server is gone" in window.run("return document.querySelector('.note').textContent")
    assert window.run("return document.querySelector('.error')") is None
    window.messages()


def test_the_name_of_the_model_is_read_on_a_narrow_screen(address: str, window: Browser) -> None:
    open_page(window, address, (360, 740))
    name = "organisation/a-model-with-a-long-name-1.7B"
    window.run(f"const before = show; show = (now) => before({{...now, model: {name!r}}})")
    window.wait_for("document.getElementById('model').textContent.includes('1.7B')")
    box = window.run(
        "const item = document.getElementById('model'), box = item.getBoundingClientRect();"
        "return [box.left, box.right, item.scrollWidth - item.clientWidth, document.documentElement.scrollWidth]"
    )
    assert box[0] >= 0 and box[1] <= 360 and box[2] <= 0 and box[3] <= 360


def test_a_key_is_asked_for(client: Client, spec: Speculator, window: Browser) -> None:
    service = serving.service(spec, api_key="secret")
    with serving.listening(service, lifespan="off") as address:
        window.open(address)
        window.wait_for("!document.getElementById('key-label').hidden")
        window.type("#key", "secret\n")
        window.wait_for("document.getElementById('model').textContent")
    service.guides.close()
    window.messages()
