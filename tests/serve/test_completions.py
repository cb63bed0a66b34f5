"""``/v1/completions``."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator
from speccompile.runtime.request import Request
from support import serving
from support.serving import MAX_LEN, Client, tokenizer

PATH = "/v1/completions"
PROMPT = "the end of the end of the"


def ids_of(text: str) -> list[int]:
    return list(tokenizer()(text)["input_ids"])


def greedy_ids(model: LlamaForCausalLM, prompt: str, new: int) -> list[int]:
    ids = torch.tensor([ids_of(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0)
    return out[0, ids.shape[1] :].tolist()


def greedy(model: LlamaForCausalLM, prompt: str, new: int) -> str:
    return str(tokenizer().decode(greedy_ids(model, prompt, new), skip_special_tokens=True))


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def test_the_greedy_text_is_that_of_generate(client: Client, target: LlamaForCausalLM) -> None:
    answer = client.complete(PROMPT, max_tokens=40)
    assert text_of(answer) == greedy(target, PROMPT, 40)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["object"] == "text_completion" and answer["model"] == "tiny" and answer["id"].startswith("cmpl-")
    usage = answer["usage"]
    assert usage["completion_tokens"] == 40
    assert usage["prompt_tokens"] == len(ids_of(PROMPT))
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]


def test_sixteen_tokens_are_the_default_and_the_context_is_the_end(client: Client) -> None:
    assert client.complete(PROMPT)["usage"]["completion_tokens"] == 16
    long = client.complete(PROMPT, max_tokens=10_000, ignore_eos=True)
    assert long["usage"]["total_tokens"] == MAX_LEN and long["choices"][0]["finish_reason"] == "length"


def test_a_stream_has_the_same_text_and_its_usage_last(client: Client) -> None:
    whole = client.complete(PROMPT, max_tokens=30)
    events = client.stream(PATH, {"prompt": PROMPT, "max_tokens": 30, "stream_options": {"include_usage": True}})
    *chunks, last = events
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text_of(whole)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"][0]["finish_reason"]] == [
        "length"
    ]
    assert len({chunk["id"] for chunk in events}) == 1
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert last["choices"] == [] and [last["usage"][name] for name in counts] == [
        whole["usage"][name] for name in counts
    ]
    assert last["metrics"]["speculative_decoding"]["num_spec_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in chunks)


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_the_usage_may_come_with_each_chunk(client: Client, path: str) -> None:
    body = {"prompt": PROMPT} if path == PATH else {"messages": [{"role": "user", "content": PROMPT}]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"max_tokens": 20, "stream_options": options, "return_token_sources": True}
    *chunks, last = client.stream(path, {**body, **fields})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    # The engine may have more tokens by then than the client.
    sent = [len(chunk["choices"][0].get("token_sources", [])) for chunk in chunks]
    assert counts == list(itertools.accumulate(sent)) and counts[-1] == last["usage"]["completion_tokens"] == 20
    # The first chunk of a chat has the role.
    assert (counts[0] == 0) == (path != PATH)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}


def test_without_stream_options_no_usage_comes(client: Client) -> None:
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in client.stream(PATH, {"prompt": PROMPT}))


def test_a_stop_string_ends_the_text_before_it(client: Client) -> None:
    text = text_of(client.complete(PROMPT, max_tokens=60))
    stop = text[20:22]
    answer = client.complete(PROMPT, max_tokens=60, stop=stop)
    assert text_of(answer) == text[: text.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 60
    chunks = client.stream(PATH, {"prompt": PROMPT, "max_tokens": 60, "stop": ["never comes", stop]})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text_of(answer)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_min_tokens_hold_off_stop_strings(client: Client) -> None:
    """As in vLLM: one that is complete before does not count, and the next one does."""
    bias = {str(ids_of("x")[0]): 100}
    fields: dict[str, Any] = {"max_tokens": 20, "logit_bias": bias, "stop": ["xx"]}
    for min_tokens, new in ((0, 2), (1, 2), (2, 3), (9, 10), (20, 20)):
        answer = client.complete("ab", min_tokens=min_tokens, **fields)
        assert answer["usage"]["completion_tokens"] == new
        expected = ("x" * (new - 2), "stop") if new < 20 else ("x" * 20, "length")
        assert (text_of(answer), answer["choices"][0]["finish_reason"]) == expected
        chunks = client.stream(PATH, {"prompt": "ab", "min_tokens": min_tokens, **fields})
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected[0]


def test_a_stop_string_in_the_prompt_ends_nothing(client: Client) -> None:
    answer = client.complete(PROMPT, max_tokens=8, stop="the")
    assert answer["usage"]["completion_tokens"] == 8 or "the" not in text_of(answer)


def test_the_eos_token_ends_the_text_unless_it_is_ignored(client: Client) -> None:
    ended = client.complete("ab", max_tokens=5, logit_bias={"0": 100})
    assert text_of(ended) == "" and ended["choices"][0]["finish_reason"] == "stop"
    assert ended["usage"]["completion_tokens"] == 1
    ignored = client.complete("ab", max_tokens=5, logit_bias={"0": 100}, ignore_eos=True)
    assert ignored["usage"]["completion_tokens"] == 5
    later = client.complete("ab", max_tokens=5, logit_bias={"0": 100}, min_tokens=3)
    assert later["usage"]["completion_tokens"] == 4


def test_a_seed_repeats_a_text_and_choices_differ(client: Client) -> None:
    fields: dict[str, Any] = {"max_tokens": 24, "temperature": 1.5, "seed": -7}
    first, again = client.complete(PROMPT, **fields), client.complete(PROMPT, **fields)
    assert text_of(first) == text_of(again)
    several = client.complete(PROMPT, n=3, **fields)["choices"]
    assert [choice["index"] for choice in several] == [0, 1, 2]
    assert several[0]["text"] == text_of(first)
    assert len({choice["text"] for choice in several}) == 3
    assert text_of(client.complete(PROMPT, **fields | {"seed": 8})) != text_of(first)


@pytest.mark.parametrize(
    "field",
    [
        {"top_k": 2},
        {"top_p": 0.3},
        {"min_p": 0.5},
        {"repetition_penalty": 50.0},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"logit_bias": {"9": 50}},
    ],
)
def test_each_sampling_field_reaches_the_engine(client: Client, field: dict[str, Any]) -> None:
    fields = {"max_tokens": 24, "temperature": 0.9, "seed": 1}
    assert text_of(client.complete(PROMPT, **fields, **field)) != text_of(client.complete(PROMPT, **fields))


def test_of_waiting_requests_the_smallest_priority_goes_first(
    spec: Speculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, engine = Client(serving.service(spec, api_key="secret")), spec.engine
    begun: list[int] = []
    remove = engine.waiting.remove

    def record(request: Request) -> bool:
        begun.append(-request.params.priority)
        return remove(request)

    monkeypatch.setattr(engine.waiting, "remove", record)
    bodies = [
        {"prompt": "ab", "max_tokens": 1, "priority": priority, "temperature": 0} for priority in (5, -(2**63) + 1, 0)
    ]

    async def ask() -> None:
        async with client.connected() as connected:
            with serving.no_steps(engine):
                headers = {"Authorization": "Bearer secret"}
                tasks = [asyncio.create_task(connected.post(PATH, json=body, headers=headers)) for body in bodies]
                while len(engine.waiting) < len(bodies):
                    await asyncio.sleep(0.001)
            for task in tasks:
                assert (await task).status_code == 200

    asyncio.run(ask())
    assert begun == [-(2**63) + 1, 0, 5]


def test_a_priority_needs_a_key(client: Client) -> None:
    answer = client.post(PATH, {"prompt": "ab", "max_tokens": 1, "priority": -1})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "priority"
    assert client.complete(max_tokens=1, priority=0)


def test_a_temperature_that_is_left_out_is_one(client: Client) -> None:
    body = {"prompt": PROMPT, "seed": 3, "max_tokens": 20}
    texts = [text_of(client.post(PATH, body | more).json()) for more in ({}, {"temperature": 1.0}, {"temperature": 0})]
    assert texts[0] == texts[1] != texts[2]


def test_token_ids_are_a_prompt_and_so_are_lists_of_prompts(client: Client) -> None:
    alone = [text_of(client.complete(prompt)) for prompt in (PROMPT, "ab")]
    for prompts in ([PROMPT, "ab"], [ids_of(PROMPT), ids_of("ab")]):
        answer = client.complete(prompts)
        assert [choice["text"] for choice in answer["choices"]] == alone
    assert text_of(client.complete(ids_of(PROMPT))) == alone[0]
    assert [choice["text"] for choice in client.complete([PROMPT, "ab"], n=2)["choices"]] == [
        text for text in alone for _ in range(2)
    ]


def test_echo_repeats_the_prompt(client: Client) -> None:
    text = text_of(client.complete(PROMPT, max_tokens=6))
    assert text_of(client.complete(PROMPT, max_tokens=6, echo=True)) == PROMPT + text
    chunks = client.stream(PATH, {"prompt": PROMPT, "max_tokens": 6, "echo": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == PROMPT + text


def reference_logprobs(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    """``[T - 1, V]``: of the token after each position."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


def test_logprobs_are_the_models_own(client: Client, target: LlamaForCausalLM) -> None:
    logprobs = client.complete(PROMPT, max_tokens=10, logprobs=4)["choices"][0]["logprobs"]
    prompt, new = ids_of(PROMPT), greedy_ids(target, PROMPT, 10)
    reference = reference_logprobs(target, prompt + new)[len(prompt) - 1 :]
    wanted = reference.gather(1, torch.tensor(new)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs["token_logprobs"]), wanted, atol=1e-4, rtol=0)
    for row, found in zip(reference, logprobs["top_logprobs"], strict=True):
        assert sorted(found.values(), reverse=True) == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == 10
    assert logprobs["text_offset"][0] == 0


def test_scoring_a_prompt_as_lm_eval_does(client: Client, target: LlamaForCausalLM) -> None:
    ids = ids_of(PROMPT + " ab é name")
    answer = client.complete([ids], max_tokens=1, logprobs=1, echo=True)
    logprobs = answer["choices"][0]["logprobs"]
    reference = reference_logprobs(target, ids)
    wanted = reference.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    torch.testing.assert_close(torch.tensor(logprobs["token_logprobs"][1:-1]), wanted, atol=1e-4, rtol=0)
    best = [max(top.values()) for top in logprobs["top_logprobs"][1:-1]]
    assert best == pytest.approx(reference.max(1).values.tolist(), abs=1e-4)
    likeliest = reference.argmax(1).tolist()
    is_greedy = [found == top for found, top in zip(logprobs["token_logprobs"][1:-1], best, strict=True)]
    assert is_greedy == [token == top for token, top in zip(ids[1:], likeliest, strict=True)]
    alone = client.complete([ids], max_tokens=0, logprobs=1, echo=True)
    assert alone["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(
        logprobs["token_logprobs"][1:-1], abs=1e-4
    )
    assert alone["usage"]["completion_tokens"] == 0 and text_of(alone) == tokenizer().decode(ids)


def test_streamed_logprobs_are_those_of_the_whole(exact_client: Client) -> None:
    """The stream reuses KV that the whole computed in steps of other widths."""
    fields = {"prompt": PROMPT, "max_tokens": 12, "logprobs": 2, "echo": False}
    whole = exact_client.complete(**fields)["choices"][0]["logprobs"]
    stats = exact_client.service.spec.stats
    before = stats.reused_tokens
    chunks = [chunk["choices"][0]["logprobs"] for chunk in exact_client.stream(PATH, fields)]
    assert stats.reused_tokens > before
    for name, values in whole.items():
        assert [item for chunk in chunks if chunk for item in chunk[name]] == values


def test_tokens_say_who_drafted_them(client: Client) -> None:
    answer = client.complete(PROMPT, max_tokens=60, return_token_sources=True)
    sources = answer["choices"][0]["token_sources"]
    accepted = answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
    assert len(sources) == 60 and {source["drafted_by"] for source in sources} == {"ngram", None}
    assert sum(source["drafted_by"] == "ngram" for source in sources) == accepted > 0
    none = client.complete(PROMPT, max_tokens=60, return_token_sources=True, num_draft_tokens=0)
    assert {source["drafted_by"] for source in none["choices"][0]["token_sources"]} == {None}
    assert text_of(none) == text_of(answer)


def test_metrics_of_a_response_agree_with_one_another(client: Client) -> None:
    found = client.complete(PROMPT, max_tokens=60)["metrics"]["speculative_decoding"]
    assert sum(found["proposed_at"]) == found["num_draft_tokens"]
    assert sum(found["accepted_at"]) == found["num_accepted_draft_tokens"]
    assert found["draft_acceptance_rate"] == found["num_accepted_draft_tokens"] / found["num_draft_tokens"]
    histogram = found["acceptance_histogram"]
    assert sum(histogram) == found["num_spec_steps"]
    assert sum(index * count for index, count in enumerate(histogram)) == found["num_accepted_draft_tokens"]
    assert found["mean_acceptance_length"] == 1 + found["num_accepted_draft_tokens"] / found["num_spec_steps"]
    assert 1 < found["acceptance_length"] <= found["mean_acceptance_length"]
    none = client.complete(PROMPT, max_tokens=8, num_draft_tokens=0)["metrics"]["speculative_decoding"]
    assert (none["num_spec_steps"], none["mean_acceptance_length"], none["acceptance_length"]) == (0, 1.0, 1.0)
