"""A server over a tiny random model, in this process with a real socket, and its clients."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import httpx2
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from speccompile.serve.server import HttpServer
from speccompile.serve.service import Service

CHAT = "/v1/chat/completions"
ANSWER_SECONDS = 600
_ROLES = ("<|end|>", "<|user|>", "<|assistant|>")
_TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def random_chat_model(max_len: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A Llama with random weights over bytes and the marks of a chat. Its text means nothing, and rarely ends by
    itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate([*_ROLES, *alphabet])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(role, special=True) for role in _ROLES])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=_ROLES[0])
    tokenizer.chat_template = _TEMPLATE
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(vocab),
        max_position_embeddings=max_len,
        # At the usual 0.02 the layers add next to nothing, and greedy text repeats one token.
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval(), tokenizer


def greedy_answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, messages: Sequence[dict[str, Any]], new_tokens: int
) -> str:
    """What transformers' ``generate`` answers."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


@contextlib.contextmanager
def listening(service: Service) -> Iterator[str]:
    """The address of a server in another thread. It closes ``service`` in the end."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = HttpServer(service)
        thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
        thread.start()
        try:
            while not server.started:
                thread.join(0.01)
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def client_of(address: str) -> httpx2.AsyncClient:
    limits = httpx2.Limits(max_connections=None)
    return httpx2.AsyncClient(base_url=address, timeout=ANSWER_SECONDS, limits=limits)


async def pieces(client: httpx2.AsyncClient, body: dict[str, Any]) -> AsyncIterator[str]:
    """The pieces of a streamed chat as they come. A reader that leaves drops the connection.

    Raises:
        RuntimeError: the stream ended with an error.
    """
    async with client.stream("POST", CHAT, json={**body, "stream": True}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""


async def choice_of(client: httpx2.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """The first choice of a chat that is not streamed."""
    answer = await client.post(CHAT, json=body)
    answer.raise_for_status()
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice
