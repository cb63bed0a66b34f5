"""Images in chats: parts of type ``image_url`` with data URLs."""

from __future__ import annotations

import base64
import io
import itertools
import struct
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import LlavaProcessor, PreTrainedModel
from transformers.image_utils import load_image

import speccompile
from speccompile import Speculator
from speccompile.multimodal.encoder import FeatureEncoder
from speccompile.serve import fetched_images
from speccompile.serve.api_error import ApiError
from speccompile.serve.image_parts import MOST_PIXELS, opened
from speccompile.serve.options import ServeOptions
from speccompile.serve.service import Service
from support import letters, serving
from support.serving import MODEL, Client
from support.vision_processor import data_url, model_of, picture, processor_of

PATH = "/v1/chat/completions"
NEW = 10


def image_part(seed: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(picture(seed)), "detail": "low"}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def asking(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": list(parts)}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": NEW, **fields}


@pytest.fixture(scope="module")
def processor() -> LlavaProcessor:
    return processor_of(letters.tokenizer())


@pytest.fixture(scope="module")
def model(processor: LlavaProcessor) -> PreTrainedModel:
    return model_of(processor)


@pytest.fixture(scope="module")
def spec(model: PreTrainedModel) -> Iterator[Speculator]:
    options: dict[str, Any] = {"tiers": (0, 3), "max_batch": 2, "max_len": 96, "backend": "eager", "scores": True}
    with speccompile.wrap(model, "ngram", **options) as spec:
        yield spec


@pytest.fixture(scope="module")
def client(spec: Speculator, processor: LlavaProcessor) -> Client:
    tokenizer = processor.tokenizer
    tokenizer.chat_template = processor.chat_template
    return Client(Service(spec, tokenizer, MODEL, ServeOptions(), processor))


def own_text(model: PreTrainedModel, processor: LlavaProcessor, parts: list[dict[str, Any]]) -> str:
    """The text of the model's ``generate`` for one message of these parts."""
    messages = [{"role": "user", "content": parts}]
    inputs = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        whole = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    text: str = processor.decode(whole[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def test_an_answer_is_transformers_own(client: Client, model: PreTrainedModel, processor: LlavaProcessor) -> None:
    parts = [text_part("abc"), image_part(1), text_part("hgf"), image_part(2)]
    images = [{"type": "image", "image": picture(seed)} for seed in (1, 2)]
    expected = own_text(model, processor, [text_part("abc"), images[0], text_part("hgf"), images[1]])
    answer = client.post(PATH, asking(*parts, n=2)).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == [expected] * 2
    streamed = client.stream(PATH, {"messages": asking(*parts)["messages"], "max_tokens": NEW})
    assert "".join(item["choices"][0]["delta"].get("content") or "" for item in streamed) == expected
    assert expected != own_text(model, processor, [text_part("abc"), images[1], text_part("hgf"), images[0]])


def test_all_choices_share_what_was_embedded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, calls = FeatureEncoder.encode, []
    monkeypatch.setattr(FeatureEncoder, "encode", lambda *given: calls.append(1) or encode(*given))
    assert client.post(PATH, asking(image_part(1), n=2)).status_code == 200
    assert len(calls) == 1


def test_other_messages_may_be_texts(client: Client, model: PreTrainedModel, processor: LlavaProcessor) -> None:
    messages = [{"role": "system", "content": "ab"}, {"role": "user", "content": [image_part(1), text_part("hgf")]}]
    answer = client.post(PATH, asking() | {"messages": messages}).json()
    image = {"type": "image", "image": picture(1)}
    expected = own_text(model, processor, [text_part("ab"), image, text_part("hgf")])
    assert answer["choices"][0]["message"]["content"] == expected
    tokens = client.post("/tokenize", {"model": MODEL, "messages": messages}).json()
    assert tokens["count"] == answer["usage"]["prompt_tokens"]


def test_chats_without_images_are_as_before(client: Client) -> None:
    parts = client.post(PATH, asking(text_part("abc"))).json()
    assert (
        parts["choices"]
        == client.post(PATH, asking() | {"messages": [{"role": "user", "content": "abc"}]}).json()["choices"]
    )


def large_picture() -> str:
    """The data URL of a small file that names more pixels than are read."""
    side = int(MOST_PIXELS**0.5) + 1
    file = io.BytesIO()
    Image.new("1", (side, side)).save(file, format="png")
    assert len(file.getvalue()) < 2**16
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://example.com/a.png", "fetches no URLs (--image-urls)"),
        ("file:///etc/passwd", "must be"),
        ("data:text/plain;base64,YWJj", "must be"),
        (None, "must be"),
        ("data:image/png;base64,YWJj", "cannot be decoded"),
        ("data:image/png;base64,???", "is not base64"),
        (data_url(picture(1))[:-300], "cannot be decoded"),
        (large_picture(), "pixels"),
    ],
    ids=["web", "file", "text", "none", "no image", "no base64", "cut", "large"],
)
def test_urls_that_are_refused(client: Client, url: str | None, says: str) -> None:
    error = client.refused(PATH, asking({"type": "image_url", "image_url": {"url": url}}, text_part("ab")))
    assert error["param"] == "messages[0].content" and says in error["message"], error
    assert len(error["message"]) < 400


def header_of_png(side: int) -> bytes:
    """The beginning of a PNG of ``side`` times ``side`` pixels, of which none follow."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        # Pillow reads it by Ghostscript.
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", "cannot be decoded"),
        # Pillow itself refuses so many pixels.
        (header_of_png(20_000), "cannot be decoded"),
    ],
    ids=["a program", "a bomb"],
)
def test_files_that_are_refused(data: bytes, says: str) -> None:
    with pytest.raises(ApiError, match=says):
        opened(data, "messages")


def test_an_image_is_turned_as_transformers_turns_it() -> None:
    turned, file = Image.Exif(), io.BytesIO()
    turned[0x0112] = 6
    picture(1).resize((8, 16)).save(file, "jpeg", exif=turned)
    expected = load_image("data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode())
    assert expected.size == (16, 8)
    assert opened(file.getvalue(), "messages").tobytes() == expected.tobytes()


def test_only_users_have_images(client: Client) -> None:
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": [image_part(1)]}]
    error = client.refused(PATH, asking() | {"messages": messages})
    assert error["param"] == "messages[1].content" and "only a user's message has images" in error["message"]


def test_a_prompt_with_a_placeholder_needs_an_image(client: Client) -> None:
    error = client.refused(PATH, asking(text_part("ab<image>")))
    assert error["param"] == "messages" and "only stands for input that is not text" in error["message"]


def test_a_model_of_text_refuses_images() -> None:
    with serving.speculator(serving.model()) as spec:
        error = Client(serving.service(spec)).refused(PATH, asking(image_part(1)))
    assert error["param"] == "messages" and "the served model reads only text" in error["message"]


class Files(BaseHTTPRequestHandler):
    """Serves a picture, and what must not be read."""

    def do_GET(self) -> None:
        if self.path == "/elsewhere":
            self.send_response(302)
            self.send_header("Location", "ftp://127.0.0.1/a.png")
            self.end_headers()
            return
        known = {"/a.png": base64.b64decode(data_url(picture(1)).partition(",")[2]), "/long": bytes(2**15)}
        self.send_response(200 if self.path in known else 404)
        self.end_headers()
        self.wfile.write(known.get(self.path, b""))

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def files() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def fetching(spec: Speculator, processor: LlavaProcessor) -> Client:
    options = ServeOptions(image_urls=True, max_body_bytes=2**14)
    return Client(Service(spec, processor.tokenizer, MODEL, options, processor))


def linked(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_an_option_allows_urls(client: Client, fetching: Client, files: str) -> None:
    expected = client.post(PATH, asking(image_part(1), text_part("ab"))).json()["choices"]
    assert fetching.post(PATH, asking(linked(f"{files}/a.png"), text_part("ab"))).json()["choices"] == expected


@pytest.mark.parametrize(
    ("path", "says"),
    [("/missing", "cannot be fetched"), ("/long", "exceeds 16384 bytes"), ("/elsewhere", "cannot be fetched")],
)
def test_urls_that_cannot_be_read(fetching: Client, files: str, path: str, says: str) -> None:
    error = fetching.refused(PATH, asking(linked(files + path)))
    assert error["param"] == "messages[0].content" and says in error["message"]


def test_a_file_must_arrive_in_time(fetching: Client, files: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=itertools.count(0.0, 20.0).__next__)
    monkeypatch.setattr(fetched_images, "time", clock)
    with pytest.raises(ApiError, match=r"exceeds 1000 bytes .* and 10 seconds"):
        fetched_images.fetched(f"{files}/a.png", 1000, "messages")
