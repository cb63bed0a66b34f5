"""Predicted outputs."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaForCausalLM

from speccompile.serve.service import Service
from support import serving
from support.serving import Client

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
#: Drawn letters: such a text is tokenised as it was written, and n-grams find little in it.
LETTERS = {
    **{"temperature": 1.0, "seed": 1, "max_tokens": 60},
    "logit_bias": {str(token): 60 for token in serving.tokenizer()("cfgjkqvxyz")["input_ids"]},
}


def predicted(text: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": text}}


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_text_is_the_same_and_more_drafts_are_accepted(client: Client, path: str) -> None:
    ask = client.chat if path == CHAT else client.complete
    plain = ask("the end", **LETTERS)
    text = text_of(plain)
    assert set(text) <= set("cfgjkqvxyz") and len(text) == 60
    assert plain["usage"].get("completion_tokens_details") is None
    right = ask("the end", **LETTERS, **predicted(text))
    wrong = ask("the end", **LETTERS, **predicted("ab" * 90))
    parts = ask("the end", **LETTERS, **predicted([{"type": "text", "text": text}]))
    assert text_of(right) == text_of(wrong) == text_of(parts) == text
    lengths = [answer["metrics"]["speculative_decoding"]["acceptance_length"] for answer in (right, plain)]
    assert lengths[0] > lengths[1]
    counts = [answer["usage"]["completion_tokens_details"] for answer in (right, parts, wrong)]
    assert counts[0]["accepted_prediction_tokens"] > 30 and counts[0] == counts[1]
    assert counts[2]["accepted_prediction_tokens"] == 0 <= counts[2]["rejected_prediction_tokens"]


def test_a_stream_says_which_tokens_were_predicted(client: Client) -> None:
    text = text_of(client.chat("the end", **LETTERS))
    body = {
        **{"messages": [{"role": "user", "content": "the end"}], "return_token_sources": True, **LETTERS},
        **{"stream_options": {"include_usage": True}, **predicted(text)},
    }
    *chunks, last = client.stream(CHAT, body)
    sources = [source["drafted_by"] for chunk in chunks for source in chunk["choices"][0].get("token_sources", ())]
    details = last["usage"]["completion_tokens_details"]
    assert sources.count("prediction") == details["accepted_prediction_tokens"] > 10


@pytest.mark.parametrize("end", [20, 21, 22, 23])
def test_accepted_tokens_after_a_stop_string_are_in_no_count(client: Client, end: int) -> None:
    """A step accepts several, and its tokens after the stop are not in the answer."""
    text = text_of(client.complete("the end", **LETTERS))
    fields = {"stop": [text[end - 10 : end]], "num_draft_tokens": 3, "return_token_sources": True, **predicted(text)}
    answer = client.complete("the end", **LETTERS, **fields)
    (choice,), usage = answer["choices"], answer["usage"]
    assert choice["text"] == text[: end - 10] and usage["completion_tokens"] == end == len(choice["token_sources"])
    found, details = answer["metrics"]["speculative_decoding"], usage["completion_tokens_details"]
    accepted = sum(source["drafted_by"] is not None for source in choice["token_sources"])
    assert accepted == found["num_accepted_draft_tokens"] == sum(found["accepted_at"])
    predicted_tokens = sum(source["drafted_by"] == "prediction" for source in choice["token_sources"])
    assert details["accepted_prediction_tokens"] == predicted_tokens


@pytest.mark.parametrize(
    ("value", "param", "says"),
    [
        ({"type": "content", "content": "a" * 400}, "prediction", "400 tokens; at most 256 (max_len)"),
        ({"type": "content", "content": [{"type": "image"}]}, "prediction.content", "only text"),
        ({"type": "other", "content": "a"}, "prediction.type", "content"),
        ({"type": "content"}, "prediction.content", "missing"),
        ("a", "prediction", "prediction"),
    ],
)
def test_a_prediction_that_is_refused(client: Client, value: Any, param: str, says: str) -> None:
    error = client.refused(CHAT, {"messages": [{"role": "user", "content": "a"}], "prediction": value})
    assert error["param"] == param and says in error["message"], error


def test_a_server_whose_mode_reads_no_predictions_refuses_them(target: LlamaForCausalLM) -> None:
    with serving.speculator(target, mode="none", tiers=(0,)) as spec:
        service: Service = serving.service(spec)
        error = Client(service).refused(COMPLETIONS, {"prompt": "ab", **predicted("ab")})
        assert error["code"] == "unsupported_field" and "drafts only by none" in error["message"]
        service.guides.close()
