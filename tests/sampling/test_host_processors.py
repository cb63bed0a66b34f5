"""``logits_processor`` and ``watermarking_config`` of a request: transformers' own text, and drafts for the others."""

from __future__ import annotations

import re
import threading
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.generation import logits_process as hf

from speccompile import Speculator, wrap
from speccompile.acceptance import Forced
from speccompile.errors import InvalidInput, InvalidOption
from support.dice import Dice
from support.engines import assert_failed
from support.errors import raises
from support.users_processors import MODES, NEW, PROMPTS, VOCAB, AfterLast, Once, model, new_tokens, of_transformers

KEYS = [654, 400, 836, 123, 340]


@cache
def spec_of(mode: str = "ngram", **options: Any) -> Speculator:
    sizes: dict[str, Any] = {"tiers": (0, 3), "max_batch": 4, "max_len": 60, "backend": "eager", "scores": True}
    return wrap(model(), mode, policy="fixed:3", **(sizes | MODES[mode] | options))


class AtLength(LogitsProcessor):
    """Position-dependent: what it prefers follows from how long the text is."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, (7 * input_ids.shape[1]) % VOCAB] += 6.0
        if input_ids.shape[1] % 3 == 0:
            scores[:, : VOCAB // 2] = -float("inf")
        return scores


class Remembers(LogitsProcessor):
    """Stateful: what it has chosen before counts, and so does how often it was called."""

    def __init__(self) -> None:
        self.calls = 0
        self.total = torch.zeros(VOCAB)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores = scores - 0.5 * self.total - (self.calls % 4)
        self.total += scores.softmax(-1)[0] * 20
        return scores


def watermark() -> list[Any]:
    return [hf.WatermarkLogitsProcessor(VOCAB, "cpu", bias=4.0)]


def self_hash() -> list[Any]:
    return [hf.WatermarkLogitsProcessor(VOCAB, "cpu", bias=4.0, seeding_scheme="selfhash", context_width=2)]


def synth_id() -> list[Any]:
    return [hf.SynthIDTextWatermarkLogitsProcessor(4, KEYS, 2**10, 3, 16, torch.device("cpu"))]


def position() -> list[Any]:
    return [AtLength()]


def memory() -> list[Any]:
    return [Remembers(), AfterLast()]


MAKE = [watermark, self_hash, synth_id, position, memory]


@cache
def expected_of(make: Any, prompt: tuple[int, ...]) -> list[int]:
    """transformers' text, once for all modes."""
    return of_transformers([*prompt], [] if make is None else make())


@pytest.mark.parametrize(("mode", "make"), [*(("ngram", make) for make in MAKE), ("early_exit", memory)])
def test_greedy_text_is_that_of_transformers_token_by_token(mode: str, make: Any) -> None:
    spec = spec_of(mode)
    for prompt in PROMPTS:
        expected = expected_of(make, tuple(prompt))
        assert expected != expected_of(None, tuple(prompt)), "or it would prove nothing"
        request = spec.engine.submit(prompt, max_new_tokens=NEW, logits_processor=make())
        assert request.result().token_ids == expected
        assert request.stats.draft_tokens == 0


@pytest.mark.parametrize("make", MAKE)
def test_a_padded_batch_gives_transformers_text(make: Any) -> None:
    """transformers calls the processors with all rows at once, and with padding; rows end at different steps."""
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    options: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": [11, 40, 90], "pad_token_id": 0}
    if make is memory:
        make = lambda: [hf.MinNewTokensLengthLogitsProcessor(width, 9, [11, 40, 90]), *synth_id()]  # noqa: E731
    expected = model().generate(ids, attention_mask=mask, logits_processor=LogitsProcessorList(make()), **options)
    assert torch.equal(spec_of().generate(ids, mask, logits_processor=make(), **options), expected)


def test_each_row_of_a_batch_has_memory_of_its_own_and_one_row_calls_the_given_object() -> None:
    given = memory()
    ids = torch.tensor([[5, 17, 5, 17], [30, 31, 32, 33]])
    both = spec_of().generate(ids, max_new_tokens=NEW, logits_processor=given)[:, 4:].tolist()
    assert both == [of_transformers(row, memory()) for row in ids.tolist()]
    assert given[0].calls == 0
    spec_of().generate(ids[:1], max_new_tokens=NEW, logits_processor=given)
    assert given[0].calls == NEW, "once for each token"


def test_it_is_called_once_for_each_token_with_the_text_so_far() -> None:
    prompt, seen = list(range(2, 40)), []

    def note(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append((input_ids[0].tolist(), scores.shape, scores.dtype, input_ids.dtype))
        return scores

    # Chunks of 32 tokens: the first of two chooses nothing.
    text = spec_of().engine.submit(prompt, max_new_tokens=8, logits_processor=note).result().token_ids
    assert [ids for ids, *_ in seen] == [prompt + text[:count] for count in range(8)]
    assert {(shape, *types) for _, shape, *types in seen} == {((1, VOCAB), torch.float32, torch.int64)}
    seen.clear()
    spec_of().engine.submit(prompt, max_new_tokens=8, logits_processor=note, prompt_logprobs=True).result()
    assert [ids for ids, *_ in seen] == [prompt + text[:count] for count in range(8)]


@pytest.mark.parametrize("mode", ["ngram", "early_exit"])
def test_rows_beside_it_keep_their_drafts_and_their_text(mode: str) -> None:
    spec = spec_of(mode)
    engine, free = spec.engine, [PROMPTS[1], [9, 8] * 4, [3] * 5]
    alone = [engine.submit(prompt, max_new_tokens=NEW).result().token_ids for prompt in free]
    expected = of_transformers(PROMPTS[2], synth_id())
    spec.stats.reset()
    submitted = [engine.submit(prompt, max_new_tokens=NEW) for prompt in free]
    submitted.insert(1, engine.submit(PROMPTS[2], max_new_tokens=NEW, logits_processor=synth_id()))
    texts = [request.result().token_ids for request in submitted]
    assert texts == [alone[0], expected, *alone[1:]]
    assert submitted[1].stats.draft_tokens == 0
    assert sum(request.stats.accepted_tokens for request in submitted) > 0
    assert not spec.arena["host_call"].any(), "slots are given back as they were"


def test_prefix_allowed_tokens_fn_leaves_the_others_their_drafts_too() -> None:
    spec = spec_of()
    asking = spec.engine.submit([4], max_new_tokens=NEW, prefix_allowed_tokens_fn=lambda *_: range(40, 60))
    free = spec.engine.submit(PROMPTS[1], max_new_tokens=NEW)
    assert all(40 <= token < 60 for token in asking.result().token_ids)
    free.result()
    assert asking.stats.draft_tokens == 0 and free.stats.accepted_tokens > 0


def test_swapped_tiers_and_rows_that_join_change_nothing() -> None:
    expected = [of_transformers(prompt, memory()) for prompt in PROMPTS]
    with wrap(
        model(), "ngram", tiers=(0, 1, 3), policy=Dice((0, 1, 3)), max_batch=2, max_len=60, backend="eager"
    ) as spec:
        requests = [spec.engine.submit(p, max_new_tokens=NEW, logits_processor=memory()) for p in PROMPTS]
        assert [request.result().token_ids for request in requests] == expected
        # Watched, prompts are read along with steps of other rows.
        first = spec.engine.submit(PROMPTS[1], max_new_tokens=NEW)
        stream = iter(first.stream())
        next(stream)
        second = spec.engine.submit(PROMPTS[2], max_new_tokens=NEW, logits_processor=memory())
        assert second.result().token_ids == expected[2]
        assert len([*stream]) == NEW - 1


def test_drawn_text_is_what_the_same_processor_in_the_graph_draws() -> None:
    options = {"do_sample": True, "seed": 11, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2}
    with wrap(model(), logits_processor=AfterLast(), tiers=(0,), max_batch=2, max_len=60, backend="eager") as in_graph:
        expected = new_tokens(in_graph, **options)
    assert new_tokens(spec_of(), logits_processor=[AfterLast()], **options) == expected
    assert new_tokens(spec_of(), **options) != expected


def test_its_place_is_that_of_transformers() -> None:
    """With one token kept, what is drawn is what transformers draws: after the penalties, before the warpers."""
    options = {"do_sample": True, "top_k": 1, "temperature": 0.4, "repetition_penalty": 1.7}
    for prompt in PROMPTS:
        expected = of_transformers(prompt, [AfterLast(), *synth_id()], **options)
        request = spec_of().engine.submit(
            prompt, max_new_tokens=NEW, logits_processor=[AfterLast(), *synth_id()], **options
        )
        assert request.result().token_ids == expected


REPLACED: list[tuple[dict[str, Any], Any]] = [
    ({"repetition_penalty": 1.8}, lambda: [hf.RepetitionPenaltyLogitsProcessor(1.05)]),
    ({"no_repeat_ngram_size": 1}, lambda: [AtLength(), hf.NoRepeatNGramLogitsProcessor(3)]),
    ({"suppress_tokens": [*range(100)]}, lambda: [hf.SuppressTokensLogitsProcessor([5])]),
    ({"prefix_allowed_tokens_fn": lambda *_: [3]}, lambda: [hf.PrefixConstrainedLogitsProcessor(lambda *_: [4], 1)]),
    ({"repetition_penalty": 1.3, "no_repeat_ngram_size": 1}, lambda: [hf.NoRepeatNGramLogitsProcessor(3)]),
    ({"repetition_penalty": 1.8}, lambda: [hf.RepetitionPenaltyLogitsProcessor(p) for p in (1.05, 1.4)]),
    ({"min_new_tokens": 9}, lambda: [hf.MinNewTokensLengthLogitsProcessor(4, 2, [11, 40, 90])]),
]


@pytest.mark.parametrize(("options", "make"), REPLACED)
def test_a_processor_replaces_the_option_of_its_type(
    options: dict[str, Any], make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_new_tokens": NEW, "eos_token_id": [11, 40, 90], "pad_token_id": 0, **options}
    ids = torch.tensor([[5, 17, 5, 17]])
    expected = model().generate(ids, attention_mask=torch.ones_like(ids), logits_processor=make(), **options)
    assert torch.equal(spec_of().generate(ids, logits_processor=make(), **options), expected)
    for name in ("repetition_penalty", "no_repeat_ngram_size"):
        if name in options:
            monkeypatch.setattr(model().generation_config, name, options.pop(name))
    assert torch.equal(spec_of().generate(ids, logits_processor=make(), **options), expected)


def test_a_processor_that_replaces_in_front_of_another_option_is_refused() -> None:
    options: dict[str, Any] = {"repetition_penalty": 1.8, "no_repeat_ngram_size": 3}
    reason = re.compile("RepetitionPenaltyLogitsProcessor.*before no_repeat_ngram_size.*leave out")
    with raises(InvalidOption, name="repetition_penalty", value=1.8, reason=reason):
        spec_of().engine.submit([1, 2], logits_processor=[hf.RepetitionPenaltyLogitsProcessor(1.1)], **options)
    with raises(
        InvalidOption, name="min_new_tokens", reason=re.compile("MinLengthLogitsProcessor.*give one of the three")
    ):
        least = hf.MinLengthLogitsProcessor(3, [5])
        spec_of().generate(torch.tensor([[1, 2]]), logits_processor=[least], min_length=8, eos_token_id=5)


CONFIGS = {
    "green list": WatermarkingConfig(bias=4.0),
    "SynthID": SynthIDTextWatermarkingConfig(4, KEYS, 16, sampling_table_size=2**10),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_watermarking_config_gives_the_scores_of_transformers(config: Any) -> None:
    """Scores of each place, drawn or not, are those that transformers draws from, watermark after the warpers."""
    ids = torch.tensor([PROMPTS[1]])
    options: dict[str, Any] = {
        "max_new_tokens": 12,
        "watermarking_config": config,
        "do_sample": True,
        "temperature": 1.3,
        "top_k": 1,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    if config is CONFIGS["green list"]:
        # A bias changes which of several tokens comes; the greatest of one is that one.
        options |= {"do_sample": False, "temperature": None, "top_k": None}
    expected = model().generate(ids, attention_mask=torch.ones_like(ids), **options)
    got = spec_of().generate(ids, seed=1, **options)
    assert torch.equal(got.sequences, expected.sequences)
    for ours, theirs in zip(got.scores, expected.scores, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_model_s_generation_config_may_ask_for_the_watermark(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["green list"]
    expected = spec_of().engine.submit(PROMPTS[1], max_new_tokens=NEW, watermarking_config=config).result().token_ids
    monkeypatch.setattr(model().generation_config, "watermarking_config", config)
    assert new_tokens(spec_of(), PROMPTS[1:2]) == [expected]


def test_an_empty_list_is_no_processor() -> None:
    expected = new_tokens(spec_of())
    spec = spec_of()
    spec.stats.reset()
    for empty in ([], LogitsProcessorList(), None):
        assert new_tokens(spec, logits_processor=empty) == expected
    assert spec.stats.acceptance_length > 1


@pytest.mark.parametrize(
    ("processor", "kind", "fields"),
    [
        (lambda ids, scores: scores[0], InvalidInput, {"reason": re.compile(r"\[1, 128\], got shape \[128\]$")}),
        (lambda ids, scores: None, InvalidInput, {"reason": re.compile(r"\[1, 128\], got None$")}),
        (lambda ids, scores: 1 / 0, ZeroDivisionError, {}),
        (lambda ids: ids, TypeError, {}),
    ],
)
def test_a_failing_processor_ends_its_own_request(
    processor: Any, kind: type[Exception], fields: dict[str, Any]
) -> None:
    spec = spec_of()
    calls = []

    def fails_at_last(*given: torch.Tensor) -> torch.Tensor:
        calls.append(given)
        return given[1] if len(calls) < 4 else processor(*given)

    expected = new_tokens(spec, PROMPTS[1:2])
    bad = spec.engine.submit([7, 8, 9], max_new_tokens=NEW, logits_processor=fails_at_last)
    assert new_tokens(spec, PROMPTS[1:2]) == expected
    assert_failed(bad, kind, **fields)
    assert len(bad.new_tokens) == 3 and len(calls) == 4
    assert new_tokens(spec, PROMPTS[1:2]) == expected


def test_generate_raises_what_a_processor_raised() -> None:
    with raises(InvalidInput, name="logits_processor", reason=re.compile("must return a tensor of shape")):
        spec_of().generate(torch.tensor([[1, 2]]), logits_processor=[lambda *_: 3])

    def interrupted(*_: Any) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spec_of().generate(torch.tensor([[1, 2]]), logits_processor=[interrupted])


def test_what_is_no_processor_is_refused() -> None:
    spec = spec_of()
    with raises(InvalidOption, name="logits_processor", reason=re.compile("a LogitsProcessor or a list of them")):
        spec.generate(torch.tensor([[1, 2]]), logits_processor=[3])
    with raises(InvalidOption, name="watermarking_config", reason=re.compile("SynthIDTextWatermarkingConfig")):
        spec.engine.submit([1, 2], watermarking_config="yes")
    holds = Once()
    holds.lock = threading.Lock()  # type: ignore[attr-defined]
    with raises(
        InvalidOption, name="logits_processor", reason=re.compile("each row needs its own copy.*Submit each row")
    ):
        spec.generate(torch.tensor([[1, 2], [3, 4]]), logits_processor=[holds])
    assert spec.generate(torch.tensor([[1, 2]]), logits_processor=[holds], max_new_tokens=2).shape == (1, 4)


def test_a_rule_that_accepts_forbidden_tokens_refuses_it() -> None:
    with (
        wrap(model(), "ngram", acceptance=Forced(2), tiers=(0, 3), max_batch=1, max_len=60, backend="eager") as spec,
        raises(InvalidOption, name="logits_processor", reason=re.compile("accepts tokens that it forbids")),
    ):
        spec.engine.submit([1, 2], logits_processor=watermark())


def test_explain_says_what_is_called_on_the_host() -> None:
    (line,) = [line for line in spec_of().explain().splitlines() if line.startswith("on the host")]
    assert "logits_processor, watermarking_config of a request are called before each of its tokens" in line
    assert "no drafts" in line


def test_a_function_of_several_rows_may_read_and_not_remember() -> None:
    ids = torch.tensor([[5, 17, 5, 17], [30, 31, 32, 33]])
    remembered: list[int] = []

    def remembers(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, remembered] = -float("inf")
        remembered.append(int(scores.argmax()))
        return scores

    bias = torch.arange(VOCAB) / 9
    both = spec_of().generate(ids, max_new_tokens=NEW, logits_processor=lambda _, scores: scores + bias)
    assert both[:, 4:].tolist() == [of_transformers(row, [lambda _, scores: scores + bias]) for row in ids.tolist()]
    reason = re.compile("a call changed 'remembered' of the function .*all rows of the batch")
    with raises(InvalidInput, name="logits_processor", reason=reason):
        spec_of().generate(ids, max_new_tokens=NEW, logits_processor=remembers)
    remembered.clear()
    alone = of_transformers(ids[0].tolist(), [remembers])
    remembered.clear()
    assert spec_of().generate(ids[:1], max_new_tokens=NEW, logits_processor=remembers)[0, 4:].tolist() == alone
