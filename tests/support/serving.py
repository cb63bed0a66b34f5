"""A server of a tiny model: in process over ASGI, and with a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import speccompile
from speccompile import Speculator
from speccompile.runtime.engine import Engine
from speccompile.serve.app import create_app
from speccompile.serve.options import ServeOptions
from speccompile.serve.server import HttpServer
from speccompile.serve.service import Service
from support.tiny import tiny_llama

MODEL = "tiny"
SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
END = 0
VOCAB = 320
MAX_LEN = 256
SLOTS = 3
WAITING = 30
TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'user' and loop.index0 and messages[loop.index0 - 1].role == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments.n }}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, special tokens of a chat, and some tokens of several bytes."""
    words = ["ab", "the", " the", "{", '{"', '":', ", ", "tool", "<tool", "call", "name", "12", " é"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    levelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [levelled.pre_tokenize_str(word)[0][0] for word in words]
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*SPECIAL, *alphabet, *pieces]))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = levelled
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")
    fast.chat_template = TEMPLATE
    return fast


def model(seed: int = 0) -> LlamaForCausalLM:
    made = tiny_llama(seed, vocab=VOCAB, initializer_range=0.08)
    made.generation_config.eos_token_id = END
    return made


def speculator(wrapped: LlamaForCausalLM, **options: Any) -> Speculator:
    return speccompile.wrap(
        wrapped,
        **{
            "mode": ["prediction", "ngram"],
            "backend": "eager",
            "max_batch": SLOTS,
            "max_len": MAX_LEN,
            "max_waiting": WAITING,
            "tiers": (0, 3),
            "scores": True,
            # A busy machine must not change how much is drafted.
            "policy": f"fixed:{max(options.get('tiers', (0, 3)))}",
            **options,
        },
    )


@contextlib.contextmanager
def no_steps(engine: Engine) -> Iterator[None]:
    """Meanwhile no thread steps, so that requests wait."""
    taken, over = threading.Event(), threading.Event()

    def hold() -> None:
        with engine.loop.exclusive():
            taken.set()
            over.wait(60)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    taken.wait(60)
    try:
        yield
    finally:
        over.set()
        thread.join(60)


class Client:
    """Calls the application in process, in an event loop of its own for each call."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.app = create_app(service)

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[httpx2.AsyncClient]:
        transport = httpx2.ASGITransport(app=self.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://server", timeout=120) as client:
            yield client

    def call(self, method: str, path: str, **keywords: Any) -> httpx2.Response:
        async def once() -> httpx2.Response:
            async with self.connected() as client:
                return await client.request(method, path, **keywords)

        return asyncio.run(once())

    def get(self, path: str, **keywords: Any) -> httpx2.Response:
        return self.call("GET", path, **keywords)

    def post(self, path: str, body: Any, **keywords: Any) -> httpx2.Response:
        return self.call("POST", path, json=body, **keywords)

    def complete(self, prompt: Any = "ab", **fields: Any) -> dict[str, Any]:
        return self._good("/v1/completions", {"model": MODEL, "prompt": prompt, "temperature": 0, **fields})

    def chat(self, content: str = "ab", **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}]
        body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 16, **fields}
        return self._good("/v1/chat/completions", body)

    def _good(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream, which ends as it has to."""
        answer = self.post(path, {"stream": True, "temperature": 0, "model": MODEL, **body})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, last = [part.removeprefix("data: ") for part in answer.text.strip().split("\n\n")]
        assert last == "[DONE]"
        return [json.loads(item) for item in events]

    def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error of a call that is refused."""
        answer = self.post(path, body)
        assert answer.status_code == status, answer.text
        error: dict[str, Any] = answer.json()["error"]
        return error


def service(spec: Speculator, **options: Any) -> Service:
    # All tests are one client.
    return Service(spec, tokenizer(), MODEL, ServeOptions(**{"max_client_share": 100} | options))


@contextlib.contextmanager
def listening(service: Service, **config: Any) -> Iterator[str]:
    """The address of a server with a real socket, in another thread."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        server = HttpServer(service, **config)
        thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server does not start"
                thread.join(0.01)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive(), "the server does not end"
