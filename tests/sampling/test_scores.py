"""Logits, scores and log-probabilities are those of the model's own forward over the final text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.generation import logits_process as hf

from speccompile import Speculator, Tree, acceptance, wrap
from speccompile.errors import InvalidOption, UnknownOption
from speccompile.modes import registry
from speccompile.policies import Fixed
from speccompile.runtime.result import Result
from support.dice import Dice
from support.errors import raises
from support.letters import tokenizer
from support.sampling_modes import Random
from support.tiny import tiny_llama

VOCAB = 128
MODES: dict[str, dict[str, Any]] = {"ngram": {}, "early_exit": {"exit_layer": 1}, "random_drafts": {}}
SIZES: dict[str, Any] = {"tiers": (0, 3), "max_batch": 2, "max_len": 63, "backend": "eager"}
SMALL: dict[str, Any] = {
    "tiers": (0, 3),
    "max_batch": 1,
    "max_len": 63,
    "backend": "eager",
    "scores": True,
    "policy": "fixed:3",
}
#: What a request may want, all of it.
ALL = {"logprobs": True, "prompt_logprobs": True, "top_logprobs": 3, "output_logits": True, "output_scores": True}
REPEATS = [1, 2, 3, 1, 2, 3, 1, 2]


@pytest.fixture(scope="module")
def specs(model: LlamaForCausalLM) -> Iterator[dict[str, Speculator]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_modes", dict(registry._modes) | {"random_drafts": Random})
        yield {mode: wrap(model, mode, scores=True, **SIZES, **options) for mode, options in MODES.items()}


@pytest.fixture
def spec(specs: dict[str, Speculator]) -> Speculator:
    specs["early_exit"].set_tier(3)
    return specs["early_exit"]


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def close(got: Any, expected: Any) -> None:
    """Up to another order of additions."""
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def forward(model: LlamaForCausalLM, text: list[int]) -> torch.Tensor:
    """Logits ``[len(text), V]``."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([text])).logits[0]
    return logits


def processed(logits: torch.Tensor, text: list[int], start: int, options: dict[str, Any]) -> torch.Tensor:
    """What transformers' processors make of the logits that chose ``text[start:]``."""
    chain = hf.LogitsProcessorList()
    if "repetition_penalty" in options:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    if options.get("do_sample"):
        chain.append(hf.TemperatureLogitsWarper(options["temperature"]))
        chain.append(hf.TopKLogitsWarper(options["top_k"]))
    places = range(start, len(text))
    return torch.cat([chain(torch.tensor([text[:i]]), logits[i - 1 : i].clone()) for i in places])


def assert_true(model: LlamaForCausalLM, ids: list[int], result: Result, options: dict[str, Any]) -> None:
    """All that the result says is what the model says of its text."""
    text, start = ids + result.token_ids, len(ids)
    logits = forward(model, text)
    assert result.logits is not None and result.scores is not None and result.logprobs is not None
    assert result.logits.dtype == result.scores.dtype == torch.float32
    close(result.logits, logits[start - 1 : -1])
    close(result.scores, processed(logits, text, start, options))
    following = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(text[1:])[:, None])[:, 0]
    close(torch.tensor(result.logprobs), following[start - 1 :])
    assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
    close(torch.tensor(result.prompt_logprobs[1:]), following[: start - 1])
    values, tokens = logits.log_softmax(-1)[:-1].topk(3)
    assert result.top_logprobs is not None and result.prompt_best is not None and result.prompt_best[0] is None
    assert [[token for token, _ in top] for top in result.top_logprobs] == tokens[start - 1 :].tolist()
    close(torch.tensor([[value for _, value in top] for top in result.top_logprobs]), values[start - 1 :])
    assert [best[0] for best in result.prompt_best[1:] if best] == tokens[: start - 1, 0].tolist()
    close(torch.tensor([best[1] for best in result.prompt_best[1:] if best]), values[: start - 1, 0])
    assert result.prompt_top_logprobs is not None and result.prompt_top_logprobs[0] is None
    tops = [top for top in result.prompt_top_logprobs if top is not None]
    assert [[token for token, _ in top] for top in tops] == tokens[: start - 1].tolist()
    close(torch.tensor([[value for _, value in top] for top in tops]).reshape(-1, 3), values[: start - 1])


# --- what requests get -------------------------------------------------------------------------------------------

PENALTY = {"repetition_penalty": 1.4}
DRAWN = {"do_sample": True, "temperature": 0.7, "top_k": 9, "repetition_penalty": 1.3}


@pytest.mark.parametrize("mode", MODES)
# With tiers that change, and each tier with one of the options.
@pytest.mark.parametrize(
    ("tier", "options"),
    [(None, PENALTY), (None, DRAWN), (0, {}), (3, DRAWN)],
)
def test_everything_is_what_the_model_says(
    model: LlamaForCausalLM, specs: dict[str, Speculator], mode: str, tier: int | None, options: dict[str, Any]
) -> None:
    """At every tier and with tiers that change; prompts of one chunk and of several, with ragged ends."""
    spec = specs[mode]
    if tier is None:
        spec.engine.policy = Dice([0, 3], 5)
    else:
        spec.set_tier(tier)
    spec.stats.reset()
    prompts = [REPEATS, prompt(1), prompt(22, seed=1), prompt(44, seed=2)]
    seeds = [{"seed": seed} if options.get("do_sample") else {} for seed in range(4)]
    requests = [
        spec.engine.submit(ids, max_new_tokens=12, **ALL, **options, **seed)
        for ids, seed in zip(prompts, seeds, strict=True)
    ]
    for ids, request in zip(prompts, requests, strict=True):
        assert len(request.result().token_ids) == 12
        assert_true(model, ids, request.result(), options)
    assert spec.stats.prefill_passes > len(prompts), "one was read in several chunks"
    assert tier == 0 or spec.stats.accepted_tokens > 0 or mode != "early_exit"


@pytest.mark.parametrize("rule", ["rejection", "block", "typical", acceptance.Forced(1.5)])
def test_whatever_the_rule_scores_are_the_targets(model: LlamaForCausalLM, rule: Any) -> None:
    with wrap(model, "early_exit", exit_layer=1, acceptance=rule, **SMALL) as spec:
        for options, seed in (({}, {}), (DRAWN, {"seed": 5})):
            spec.stats.reset()
            result = spec.engine.submit(REPEATS, max_new_tokens=20, **ALL, **options, **seed).result()
            assert spec.stats.accepted_tokens > 0
            assert_true(model, REPEATS, result, options)


def test_relaxed_keeps_scores_too(model: LlamaForCausalLM) -> None:
    rule = acceptance.Relaxed(begin=1, end=4, top_k=VOCAB, delta=1.0)
    with wrap(model, "early_exit", exit_layer=1, acceptance=rule, **SMALL) as spec:
        result = spec.engine.submit([1, 5, 6], max_new_tokens=13, **ALL).result()
        assert spec.stats.accepted_tokens > 0
        assert_true(model, [1, 5, 6], result, {})


def test_of_a_tree_they_are_those_of_the_accepted_path(model: LlamaForCausalLM) -> None:
    tree = Tree.static([(0,), (1,), (1, 0), (0, 0), (0, 1), (0, 0, 0)])
    sizes = SMALL | {"tiers": (0, tree), "policy": Fixed(tree)}
    with wrap(model, "draft_target", draft=tiny_llama(vocab=VOCAB), **sizes) as spec:
        for options, seed in (({}, {}), (DRAWN, {"seed": 5})):
            spec.stats.reset()
            result = spec.engine.submit(REPEATS, max_new_tokens=20, **ALL, **options, **seed).result()
            assert spec.stats.acceptance_length > 2
            assert_true(model, REPEATS, result, options)


def test_half_precision_is_recorded_in_float32() -> None:
    model = tiny_llama(vocab=VOCAB, dtype=torch.bfloat16)
    with wrap(model, "ngram", **SMALL) as spec:
        result = spec.engine.submit(REPEATS, max_new_tokens=20, **ALL).result()
        assert result.logits is not None and result.scores is not None and result.logprobs is not None
        assert result.logits.dtype == result.scores.dtype == torch.float32
        assert torch.equal(result.logits, result.logits.bfloat16().float())
        expected = result.logits.log_softmax(-1)[range(20), result.token_ids]
        close(torch.tensor(result.logprobs), expected)
        assert result.token_ids == result.scores.argmax(-1).tolist()


def test_what_is_not_asked_for_is_none(spec: Speculator) -> None:
    result = spec.engine.submit(prompt(9), max_new_tokens=5, logprobs=True).result()
    assert result.logprobs is not None and len(result.logprobs) == 5
    assert (result.prompt_logprobs, result.logits, result.scores) == (None, None, None)
    result = spec.engine.submit(prompt(9), max_new_tokens=5, output_scores=True).result()
    assert result.scores is not None and result.scores.shape == (5, VOCAB)
    assert (result.prompt_logprobs, result.logits, result.logprobs) == (None, None, None)
    result = spec.engine.submit(prompt(9), max_new_tokens=5, prompt_logprobs=True).result()
    assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == 9
    assert (result.logprobs, result.logits, result.scores) == (None, None, None)


def test_asking_changes_no_text(model: LlamaForCausalLM, spec: Speculator) -> None:
    """Neither one's own nor a neighbour's; and neighbours have nothing of it, and go back to their own executables."""
    asked = [{}, {"do_sample": True, "seed": 4}, {"do_sample": True, "seed": 9, "top_k": 3}]
    expected = [spec.engine.submit(prompt(30, 7), max_new_tokens=30, **options).result().token_ids for options in asked]
    scored = [spec.engine.submit(prompt(30, 7), max_new_tokens=30, **options, **ALL) for options in asked]
    assert [request.result().token_ids for request in scored] == expected
    first = spec.engine.submit(prompt(12), max_new_tokens=6, **ALL)
    others = [spec.engine.submit(prompt(30, 7), max_new_tokens=30, **options) for options in asked]
    kinds = set()
    while not all(request.finished for request in others):
        finished = first.finished
        if spec.engine.step():
            kinds.add((spec.engine.tier.key.sampling, finished))
    assert kinds >= {("scored", False), ("sampled", True)} and ("scored", True) not in kinds
    for request, text in zip(others, expected, strict=True):
        result = request.result()
        assert result.token_ids == text
        assert (result.logprobs, result.prompt_logprobs, result.logits, result.scores) == (None, None, None, None)


def test_a_known_beginning_is_read_again_for_its_log_probabilities(model: LlamaForCausalLM, spec: Speculator) -> None:
    ids = prompt(40, seed=11)
    spec.engine.submit(ids, max_new_tokens=4).result()
    reused = spec.engine.submit(ids, max_new_tokens=9, logprobs=True, output_logits=True, output_scores=True).result()
    assert reused.stats.reused_tokens == 39
    fresh = spec.engine.submit(ids, max_new_tokens=9, **ALL).result()
    assert fresh.stats.reused_tokens == 0 and fresh.stats.prefill_tokens == 40
    assert_true(model, ids, fresh, {})
    assert reused.token_ids == fresh.token_ids
    close(torch.tensor(reused.logprobs), torch.tensor(fresh.logprobs))
    close(reused.logits, fresh.logits)
    close(reused.scores, fresh.scores)
    # Others may have what it computed.
    assert spec.engine.submit(ids, max_new_tokens=1).result().stats.reused_tokens == 39


def test_a_stop_cuts_what_was_recorded(model: LlamaForCausalLM) -> None:
    """The whole model drafts, so that the stop lies in the middle of a step."""
    letters = tokenizer()
    with wrap(model, "early_exit", exit_layer=2, **SMALL) as spec:
        ids = prompt(6, seed=3)
        whole = spec.engine.submit(ids, max_new_tokens=20).result().token_ids
        # The first token is the prompt's; then steps of four. The sixth is the first of a step.
        stop = letters.decode(whole[5:6])
        result = spec.engine.submit(ids, max_new_tokens=20, stop=stop, tokenizer=letters, **ALL).result()
        count = len(result.token_ids)
        assert result.finish_reason == "stop" and result.token_ids == whole[:count] and (count - 1) % 4
        assert_true(model, ids, result, {})


def test_eos_and_max_len_cut_what_was_recorded(model: LlamaForCausalLM, spec: Speculator) -> None:
    ids = prompt(6, seed=3)
    whole = spec.engine.submit(ids, max_new_tokens=20).result().token_ids
    result = spec.engine.submit(ids, max_new_tokens=20, eos_token_id=whole[7], **ALL).result()
    assert result.finish_reason == "eos"
    assert_true(model, ids, result, {})
    ids = prompt(56, seed=3)
    result = spec.engine.submit(ids, max_new_tokens=20, **ALL).result()
    assert result.finish_reason == "max_len" and len(result.token_ids) == 7
    assert_true(model, ids, result, {})


def test_a_request_that_is_cancelled_keeps_what_it_has(model: LlamaForCausalLM, spec: Speculator) -> None:
    ids = prompt(6, seed=3)
    request = spec.engine.submit(ids, max_new_tokens=50, **ALL)
    while len(request.new_tokens) < 5:
        spec.engine.step()
    request.cancel()
    assert_true(model, ids, request.result(), {})
    request = spec.engine.submit(ids, max_new_tokens=50, **ALL)
    request.cancel()
    result = request.result()
    assert (result.logprobs, result.prompt_logprobs) == ([], [None])
    assert result.logits is not None and result.logits.shape == (0, VOCAB)


def test_results_that_are_read_one_step_late(model: LlamaForCausalLM, spec: Speculator) -> None:
    """The next run has overwritten what a step recorded by the time it is read."""
    spec.engine.scheduler.late = True
    try:
        requests = [spec.engine.submit(prompt(length), max_new_tokens=24, **ALL) for length in (5, 9, 30)]
        spec.engine.run()
        for request in requests:
            assert_true(model, request.prompt, request.result(), {})
    finally:
        spec.engine.scheduler.late = False


# --- what it costs -----------------------------------------------------------------------------------------------


def test_greedy_steps_know_nothing_of_it_and_big_tensors_are_opt_in(model: LlamaForCausalLM, spec: Speculator) -> None:
    with wrap(model, "early_exit", exit_layer=1, **SIZES) as plain:
        slots, width = SIZES["max_batch"] + 1, 4
        assert spec.arena.nbytes - plain.arena.nbytes == slots * (width * VOCAB * 8 + 3 * 8)
        assert set(spec.arena) - set(plain.arena) == {"kept_logits", "kept_scores", "kept_drafts"}
        places = {name: tensor.data_ptr() for name, tensor in plain.arena.items()}
        plain.generate(torch.tensor([[1, 2]]), max_new_tokens=4)
        plain.engine.submit([1, 2], max_new_tokens=4, do_sample=True).result()
        assert {kind for _, _, kind in plain.engine.tiers} == {"greedy", "sampled"}
        result = plain.engine.submit([1, 2], max_new_tokens=4, logprobs=True, prompt_logprobs=True).result()
        assert result.logprobs is not None and result.prompt_logprobs is not None
        assert {kind for _, _, kind in plain.engine.tiers} == {"greedy", "sampled", "scored"}
        assert {name: tensor.data_ptr() for name, tensor in plain.arena.items()} == places
        recorded = {
            "token_logprobs",
            "chunk_logprobs",
            "chunk_best",
            "chunk_best_logprobs",
            "kept_logits",
            "kept_scores",
            "kept_drafts",
        }
        for engine in (plain.engine, spec.engine):
            for tier in [*engine.tiers.values(), *engine.prefill_tiers.values()]:
                scored = tier.key.sampling in ("scored", "prompt_scored")
                assert bool(recorded & set(tier.argument_names)) is scored, tier.name
        for name, tier in plain.engine.tiers.items():
            if name[2] == "greedy":
                assert tier.stages.last.python == spec.engine.tiers[name].stages.last.python
        # Only who wants the prompt's own pays for logits of the whole chunk.
        heads = {
            kind: plain.engine.prefill_tiers[16, kind].graph.op_counts()["aten.linear.default"]
            for kind in ("greedy", "scored", "prompt_scored")
        }
        assert heads["scored"] == heads["greedy"] == heads["prompt_scored"] - 1


@pytest.mark.parametrize("name", ["output_logits", "output_scores"])
def test_without_room_the_error_says_so(model: LlamaForCausalLM, name: str) -> None:
    without_room = {"name": name, "value": True, "reason": re.compile("wrap with scores=True")}
    with wrap(model, "none", tiers=(0,), max_len=32, backend="eager") as spec:
        with raises(InvalidOption, where="submit", **without_room):
            spec.engine.submit([1], **{name: True})
        with raises(InvalidOption, where="generate", **without_room):
            spec.generate(torch.tensor([[1]]), return_dict_in_generate=True, **{name: True})
        model.generation_config.return_dict_in_generate = True
        setattr(model.generation_config, name, True)
        try:
            with raises(InvalidOption, where="the model's generation_config", **without_room):
                spec.generate(torch.tensor([[1]]))
        finally:
            model.generation_config.return_dict_in_generate = False
            setattr(model.generation_config, name, False)


@pytest.mark.parametrize("name", sorted({*ALL} - {"top_logprobs"}))
@pytest.mark.parametrize("value", [1, None, "yes"])
def test_options_of_scores_must_be_bools(spec: Speculator, name: str, value: Any) -> None:
    with raises(InvalidOption, where="submit", name=name, value=value, reason="use True or False"):
        spec.engine.submit([1], **{name: value})


def test_top_logprobs_are_bounded_by_the_vocabulary_and_need_kept_logits(
    spec: Speculator, model: LlamaForCausalLM
) -> None:
    for value in (-1, 101, True, "yes"):
        with raises(InvalidOption, where="submit", name="top_logprobs", value=value):
            spec.engine.submit([1], top_logprobs=value)  # type: ignore[arg-type]
    reason = re.compile("scores=True")
    with (
        wrap(model, "none", **{**SMALL, "tiers": (0,), "policy": None, "scores": False}) as bare,
        raises(InvalidOption, where="submit", name="top_logprobs", value=2, reason=reason),
    ):
        bare.engine.submit([1], top_logprobs=2)


def test_wrap_checks_its_flag(model: LlamaForCausalLM) -> None:
    with raises(InvalidOption, where="wrap", name="scores", value=1, reason=re.compile("use True or False")):
        wrap(model, scores=1)  # type: ignore[arg-type]


def test_a_name_that_is_wrong(spec: Speculator) -> None:
    with raises(
        UnknownOption,
        where="submit",
        names="logprob",
        known=re.compile("prompt_logprobs, top_logprobs, output_logits, output_scores"),
    ):
        spec.engine.submit([1], logprob=True)
