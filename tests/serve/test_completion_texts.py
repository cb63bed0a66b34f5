"""The texts of completions: their first space, the prompt that is repeated, and the places of tokens in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerBase

from speccompile import Speculator
from speccompile.runtime.score_records import Records
from speccompile.serve.options import ServeOptions
from speccompile.serve.service import Service
from support import serving
from support.guide_tokenizers import llama_like
from support.serving import MODEL, Client

PATH = "/v1/completions"
SPACE = "\u2581"
PROMPT = "the cat"


@pytest.fixture(scope="module")
def llama(spec: Speculator) -> Iterator[Client]:
    """The server's model with the tokenizer of Llama 2."""
    words = [SPACE + "the", SPACE + "cat", SPACE + "sat", SPACE * 3, SPACE + "x"]
    service = Service(spec, llama_like(*words), MODEL, ServeOptions(max_client_share=100))
    assert len(service.tokenizer) <= serving.VOCAB
    yield Client(service)
    service.guides.close()


def texts(client: Client, prompt: Any = PROMPT, **fields: Any) -> tuple[str, str]:
    """Of a whole answer and of a stream."""
    whole = client.complete(prompt, **fields)["choices"][0]["text"]
    chunks = client.stream(PATH, {"prompt": prompt, **fields})
    return whole, "".join(chunk["choices"][0]["text"] for chunk in chunks)


def only(tokenizer: PreTrainedTokenizerBase, token: str) -> dict[str, int]:
    """A bias with which ``token`` is the only one that comes."""
    return {str(tokenizer.convert_tokens_to_ids(token)): 100}


@pytest.mark.parametrize(("token", "text"), [(SPACE + "sat", " sat"), (SPACE * 3, "   "), (SPACE, " ")])
def test_a_completion_keeps_its_first_space(llama: Client, token: str, text: str) -> None:
    bias = only(llama.service.tokenizer, token)
    for prompt in (PROMPT, llama.service.tokenizer(PROMPT)["input_ids"]):
        assert texts(llama, prompt, max_tokens=1, logit_bias=bias) == (text, text)
        # The name of the BOS token is no part of the prompt.
        assert texts(llama, prompt, max_tokens=1, logit_bias=bias, echo=True) == (PROMPT + text,) * 2
    # The prompt "" is the beginning of a text.
    begins = llama.complete([1], max_tokens=2, logit_bias=bias)["choices"][0]["text"]
    assert begins == (text * 2)[1:]


def test_a_stop_string_may_be_at_the_first_space(llama: Client) -> None:
    bias = only(llama.service.tokenizer, SPACE + "sat")
    answer = llama.complete(PROMPT, max_tokens=5, logit_bias=bias, stop=[" s"])
    assert answer["choices"][0]["text"] == "" and answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1


def test_a_chat_keeps_its_first_space_too(llama: Client) -> None:
    """Its text is that of its log-probabilities, as of a completion, unless the prompt has only special tokens."""
    llama.service.tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    bias = only(llama.service.tokenizer, SPACE + "sat")
    choice = llama.chat(PROMPT, max_tokens=2, logit_bias=bias, logprobs=True)["choices"][0]
    assert (
        choice["message"]["content"] == "".join(item["token"] for item in choice["logprobs"]["content"]) == " sat sat"
    )


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["the", " the", "   x", "\n the", "caf\u00e9 \U0001f642 x", "the<|end|>the"])
def test_offsets_are_places_in_the_text(client: Client, llama: Client, prompt: str, echo: bool) -> None:
    for of in (client, llama):
        # Bytes of several characters among the tokens, none of which ends the text.
        fields = {"max_tokens": 40, "seed": 5, "temperature": 1.0, "echo": echo, "logprobs": 0, "ignore_eos": True}
        choice = of.complete(prompt, **fields)["choices"][0]
        text, logprobs = choice["text"], choice["logprobs"]
        assert not echo or text.startswith(prompt)
        offsets = logprobs["text_offset"]
        assert offsets == sorted(offsets) and offsets[-1] <= len(text)
        vocabulary = of.service.vocabulary
        special = {vocabulary.text_of(token) for token in range(serving.VOCAB) if vocabulary.is_special(token)}
        for token, offset in zip(logprobs["tokens"], offsets, strict=True):
            # Of bytes that are no text, this decoder takes those beside them for such, too.
            if token in special or token.startswith("bytes:") or (of is llama and len(token) == 1):
                continue
            assert text.startswith(token, offset), (token, offset)


def test_special_tokens_that_are_shown_have_places(client: Client) -> None:
    bias = {"2": 100, "3": 99.9}
    fields: dict[str, Any] = {"ignore_eos": True, "logit_bias": bias, "frequency_penalty": 1.0, "logprobs": 0}
    choice = client.complete("ab", max_tokens=6, skip_special_tokens=False, **fields)["choices"][0]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    shown = choice["text"]
    assert len(set(tokens[:3])) > 1 or tokens[0].startswith("<|")
    assert all(shown[place : place + len(token)] == token for token, place in zip(tokens, offsets, strict=True))


def test_an_echo_has_no_name_of_a_bos_token(spec: Speculator) -> None:
    made = serving.tokenizer.__wrapped__()
    around = processors.TemplateProcessing(
        single="<|system|> $A <|tool|>", special_tokens=[("<|system|>", 1), ("<|tool|>", 4)]
    )
    made.backend_tokenizer.post_processor = around
    made.bos_token = "<|system|>"
    client = Client(Service(spec, made, MODEL, ServeOptions(max_client_share=100)))
    for prompt in ("the", made("the")["input_ids"][:-1], "<|user|>the"):
        shown = prompt if isinstance(prompt, str) else "the"
        choice = client.complete(prompt, max_tokens=0, echo=True, logprobs=1)["choices"][0]
        offsets = choice["logprobs"]["text_offset"]
        assert choice["text"] == shown and offsets[:2] == [0, 0]
        assert offsets[-1] == len(shown) - (not isinstance(prompt, str))
    client.service.guides.close()


def test_a_log_probability_of_minus_infinity_is_a_number(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON has no infinity. A model may have it, for ids that are no tokens."""
    infinite = float("-inf")
    monkeypatch.setattr(Records, "logprobs", lambda self, count: [infinite] * count)
    monkeypatch.setattr(Records, "prompt_logprobs", property(lambda self: [None, infinite]))
    monkeypatch.setattr(Records, "top_logprobs", lambda self, count: [[(5, infinite)]] * count)
    fields = {"max_tokens": 2, "logprobs": 1, "echo": True}
    found = client.complete("ab", **fields)["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [None, *[-9999.0] * 3]
    assert {value for top in found["top_logprobs"][2:] for value in top.values()} == {-9999.0}
    chunks = [chunk["choices"][0]["logprobs"] for chunk in client.stream(PATH, {"prompt": "ab", **fields})]
    assert [value for chunk in chunks for value in chunk["token_logprobs"]] == found["token_logprobs"]
    chat = client.chat(max_tokens=2, logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"]
    assert {item["logprob"] for item in chat} == {-9999.0}
