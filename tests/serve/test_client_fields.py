"""Fields that clients send by default or by a common setting."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from speccompile.serve.api_error import ApiError
from speccompile.serve.fields import Message
from speccompile.serve.ignored import log_ignored
from speccompile.serve.infill import INFILL_FORMS, InfillForm, check_infill_ids, infill_form, infill_prompt
from speccompile.serve.prompts import chat_ids
from speccompile.serve.streams import event
from speccompile.serve.template_fields import Reasoning, TemplateFields
from speccompile.serve.tool_fields import Tool, ToolFields
from support.serving import VOCAB, Client, tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "the end of the end of the"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": PROMPT},
    CHAT: {"messages": [{"role": "user", "content": PROMPT}]},
}
DRAWN = {"temperature": 1.2, "seed": 5}


def whole(client: Client, path: str, fields: dict[str, Any]) -> tuple[str, str]:
    """The text of an answer, and its end."""
    answer = client.post(path, {"temperature": 0, **BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["text"] if path == COMPLETIONS else choice["message"]["content"], choice["finish_reason"]


def streamed(client: Client, path: str, fields: dict[str, Any]) -> str:
    choices = [chunk["choices"][0] for chunk in client.stream(path, BODIES[path] | fields)]
    return "".join(
        choice["text"] if path == COMPLETIONS else choice["delta"].get("content") or "" for choice in choices
    )


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"max_tokens": 6.0}, {"max_tokens": 6}),
        ({"max_tokens": -1}, {"max_tokens": 10_000}),
        ({"max_tokens": 8, "stop": ""}, {"max_tokens": 8}),
        ({"max_tokens": 8, "stop": ["", "e", ""]}, {"max_tokens": 8, "stop": "e"}),
        ({"max_tokens": 8, "stop": [f"<{i}>" for i in range(40)]}, {"max_tokens": 8}),
        ({"max_tokens": 8, **DRAWN, "top_k": 40.0}, {"max_tokens": 8, **DRAWN, "top_k": 40}),
        ({"max_tokens": 8, **DRAWN, "top_p": 0}, {"max_tokens": 8}),
        ({"max_tokens": 8, "temperature": 1e-6}, {"max_tokens": 8}),
        ({"max_tokens": 8, "stream_options": {"include_usage": True}}, {"max_tokens": 8}),
        ({"max_tokens": 8, "function_call": "auto", "use_beam_search": False}, {"max_tokens": 8}),
        ({"max_tokens": 8, "reasoning_effort": "low", "verbosity": "high"}, {"max_tokens": 8}),
        ({"max_tokens": 8, "stop_token_ids": [90.0]}, {"max_tokens": 8, "stop_token_ids": [90]}),
    ],
)
def test_a_value_stands_for_another(client: Client, path: str, fields: dict[str, Any], same: dict[str, Any]) -> None:
    assert whole(client, path, fields) == whole(client, path, same)


def test_no_log_probabilities_may_be_false(client: Client) -> None:
    """Some clients send the field of chats to both endpoints."""
    assert client.complete("ab", max_tokens=2, logprobs=False)["choices"][0]["logprobs"] is None


def test_token_ids_may_be_written_with_a_fraction_of_zero(client: Client) -> None:
    plain = client.complete([[5, 6], [7]], max_tokens=4)["choices"]
    assert client.complete([[5.0, 6], [7.0]], max_tokens=4)["choices"] == plain
    assert client.complete([5.0, 6.0], max_tokens=4)["choices"][0]["text"] == plain[0]["text"]
    text = client.post("/detokenize", {"tokens": [5, 90]}).json()
    assert client.post("/detokenize", {"tokens": [5.0, 90.0]}).json() == text
    assert client.refused("/detokenize", {"tokens": [5, 6.5]})["param"] == "tokens[1]"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_request_for_padding_changes_no_event_and_is_logged(
    client: Client, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    log_ignored.cache_clear()
    fields = {"max_tokens": 8, "stream_options": {"include_obfuscation": True}}
    assert streamed(client, path, fields) == streamed(client, path, {"max_tokens": 8})
    assert any(message.startswith("stream_options.include_obfuscation is ignored") for message in caplog.messages)


TOOL: dict[str, Any] = {"name": "f", "description": "a", "parameters": {"type": "object", "properties": {}}}
EXTRA = {"cache_control": {"type": "ephemeral"}, "x-vendor": 1}


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": TOOL, **EXTRA},
        {"type": "function", "function": TOOL, "strict": True},
        {"type": "function", "function": TOOL | EXTRA},
    ],
)
def test_a_field_that_tools_do_not_have_is_not_in_the_prompt_and_is_logged(
    tool: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    log_ignored.cache_clear()
    given, plain = Tool.model_validate(tool), Tool.model_validate({"type": "function", "function": TOOL})
    assert [message.partition(" is ignored")[0] for message in caplog.messages] == [ToolFields.ignores[0]]
    made, messages = with_template("{{ tools }}"), [Message(role="user", content="ab")]
    made.chat_template += "{% for message in messages if message.tool_calls %}{% endfor %}<tool_call>"
    ids = [chat_ids(made, messages, [item], TemplateFields()) for item in (given, plain)]
    assert ids[0] == ids[1] and "'f'" in made.decode(ids[0])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("drawn", [{}, DRAWN], ids=["greedy", "drawn"])
def test_a_stop_token_ends_the_text_and_is_not_in_it(client: Client, path: str, drawn: dict[str, Any]) -> None:
    fields = {"max_tokens": 30, "ignore_eos": True, **drawn}
    body = {"temperature": 0, **BODIES[path], **fields, "return_token_sources": True}
    sources = client.post(path, body).json()["choices"][0]["token_sources"]
    by_bytes = {client.service.vocabulary.bytes_of(token): token for token in range(VOCAB)}
    tokens = [by_bytes[bytes(source["bytes"])] for source in sources]
    # A token with a text, which has not come before.
    place = next(i for i, token in enumerate(tokens) if i and sources[i]["bytes"] and token not in tokens[:i])
    stop = {"stop_token_ids": [tokens[place]]}
    text, reason = whole(client, path, fields | stop)
    assert text == tokenizer().decode(tokens[:place], skip_special_tokens=True) and reason == "stop"
    assert streamed(client, path, fields | stop) == text
    later, _ = whole(client, path, fields | stop | {"min_tokens": place + 3})
    assert len(later) > len(text)


def test_special_tokens_are_in_the_text_where_they_are_not_skipped(client: Client) -> None:
    fields = {"max_tokens": 3, "logit_bias": {"2": 100}, "skip_special_tokens": False}
    for path in BODIES:
        assert whole(client, path, fields) == ("<|user|>" * 3, "length")
        assert streamed(client, path, fields) == "<|user|>" * 3
        assert whole(client, path, fields | {"stop": "r|><|u"}) == ("<|use", "stop")
        # The token that ends a text is no part of it.
        assert whole(client, path, fields | {"logit_bias": {"0": 100}}) == ("", "stop")


def test_typical_p_reaches_the_engine(client: Client) -> None:
    fields = {"max_tokens": 16, **DRAWN}
    assert whole(client, COMPLETIONS, fields | {"typical_p": 0.2}) != whole(client, COMPLETIONS, fields)
    assert whole(client, COMPLETIONS, fields | {"typical_p": 1}) == whole(client, COMPLETIONS, fields)
    assert whole(client, COMPLETIONS, {"max_tokens": 16, "typical_p": 0.2}) == whole(client, COMPLETIONS, {})


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_an_echo_has_the_likeliest_tokens_of_each_place(
    exact_client: Client, target: LlamaForCausalLM, count: int
) -> None:
    ids = list(tokenizer()(PROMPT)["input_ids"])
    fields = {"prompt": ids, "echo": True, "logprobs": count, "max_tokens": 3}
    logprobs = exact_client.complete(**fields)["choices"][0]["logprobs"]
    with torch.no_grad():
        reference = target(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    if not count:
        assert logprobs["top_logprobs"] is None
        return
    assert logprobs["top_logprobs"][0] is None and len(logprobs["top_logprobs"]) == len(ids) + 3
    for row, token, found in zip(reference, ids[1:], logprobs["top_logprobs"][1:], strict=False):
        likeliest = [*row.topk(count).indices.tolist(), token]
        wanted = {exact_client.service.vocabulary.text_of(item): float(row[item]) for item in likeliest}
        # Ids above the tokenizer's have no text, so several share one entry.
        assert {**found, "": 0.0} == pytest.approx({**wanted, "": 0.0}, abs=1e-4)
    chunks = [chunk["choices"][0]["logprobs"] for chunk in exact_client.stream(COMPLETIONS, fields)]
    assert [top for chunk in chunks if chunk for top in chunk["top_logprobs"]] == logprobs["top_logprobs"]


def with_template(template: str) -> PreTrainedTokenizerBase:
    made = copy.deepcopy(tokenizer())
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "medium True"),
        ({"reasoning_effort": "high"}, "high True"),
        ({"reasoning_effort": "none"}, "none False"),
        ({"reasoning": {"effort": "low"}}, "low True"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "medium False"),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, "none True"),
    ],
)
def test_the_template_has_the_variables_of_a_request(
    fields: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = with_template("{{ reasoning_effort|default('medium') }} {{ enable_thinking|default(true) }}")
    ids = chat_ids(made, [Message(role="user", content="ab")], None, TemplateFields(**fields))
    assert made.decode(ids) == text and not caplog.messages


@pytest.mark.parametrize(
    ("reasoning", "effort"), [({"effort": "low", "summary": "auto"}, "low"), ({"max_tokens": 9}, None)]
)
def test_other_fields_of_a_reasoning_are_logged(
    reasoning: dict[str, Any], effort: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    log_ignored.cache_clear()
    given = TemplateFields.model_validate({"reasoning": reasoning}).reasoning
    assert given is not None and given.model_dump() == {"effort": effort}
    assert [message.partition(",")[0] for message in caplog.messages] == [f"{Reasoning.ignores[0]} is ignored"]


def test_a_variable_that_the_template_does_not_have_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log_ignored.cache_clear()
    given = TemplateFields(chat_template_kwargs={"a": 1, "b": 2, "enable_thinking": False}, reasoning_effort="low")
    for _ in range(2):
        chat_ids(with_template("{{ enable_thinking }}"), [Message(role="user", content="ab")], None, given)
    assert caplog.messages == ["chat_template_kwargs is ignored, since the chat template has no such variable"]


def test_an_answer_continues_the_last_message(client: Client) -> None:
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "the"}]
    body = {"messages": messages, "continue_final_message": True}
    for given in (body, body | {"add_generation_prompt": False}):
        ids = client.post("/tokenize", given).json()["tokens"]
        assert tokenizer().decode(ids) == "<|user|>ab<|end|><|assistant|>the"
    answer = client.post(CHAT, body | {"max_tokens": 9, "temperature": 0}).json()
    plain = client.complete(ids, max_tokens=9)
    assert answer["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("form", INFILL_FORMS, ids=lambda form: form.tokens[0])
def test_each_form_of_filling_in_is_found_by_its_tokens(form: InfillForm) -> None:
    made = copy.deepcopy(tokenizer())
    made.add_tokens([*form.tokens, *form.ends], special_tokens=True)
    assert infill_form(made) is form
    # The space in tokens of Code Llama is written by SentencePiece, which this tokenizer is not.
    if not form.tokens[0].startswith("▁"):
        check_infill_ids(made, form, made(infill_prompt(form, "a", "b"))["input_ids"])
    with pytest.raises(ApiError, match="does not parse special tokens"):
        check_infill_ids(made, form, made("a")["input_ids"])
    text = infill_prompt(form, "{a}", "{suffix}")
    assert text.count("{a}") == text.count("{suffix}") == 1


def test_a_suffix_asks_for_the_text_between(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    form = INFILL_FORMS[0]
    made = copy.deepcopy(tokenizer())
    made.add_tokens([*form.tokens, *form.ends], special_tokens=True)
    monkeypatch.setattr(client.service, "tokenizer", made)
    ids = made("<|fim_prefix|>the<|fim_suffix|>end<|fim_middle|>")["input_ids"]
    assert len(ids) == 3 + len(made("the")["input_ids"]) + len(made("end")["input_ids"])
    filled, plain = client.complete("the", suffix="end", max_tokens=9), client.complete(ids, max_tokens=9)
    assert filled["choices"][0]["text"] == plain["choices"][0]["text"]
    assert filled["usage"]["prompt_tokens"] == len(ids)
    pad = made.convert_tokens_to_ids("<|fim_pad|>")
    ended = client.complete("the", suffix="end", max_tokens=9, logit_bias={str(pad): 100})
    assert ended["usage"]["completion_tokens"] == 1 and ended["choices"][0]["finish_reason"] == "stop"


def test_no_character_of_a_text_ends_a_line_of_its_event() -> None:
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x10000)]))
    lines = event({"text": text}).splitlines()
    assert len(lines) == 2 and json.loads(lines[0].removeprefix("data: ")) == {"text": text}
