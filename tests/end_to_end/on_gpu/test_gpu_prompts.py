"""Prompts on a GPU: known beginnings, and long ones beside running streams."""

from __future__ import annotations

import pytest

from support.engines import always_mixes
from support.gpu_texts import wrapped
from support.tiny import greedy, random_prompt, tiny_llama

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", ["ngram", "early_exit"])
def test_a_known_beginning_is_not_read_again(mode: str) -> None:
    plain, options = tiny_llama(), {"exit_layer": 1} if mode == "early_exit" else {}
    known = random_prompt(60, seed=4)
    with wrapped(tiny_llama().cuda(), mode, max_len=96, **options) as spec:
        for tier in (0, 3):
            spec.set_tier(tier)
            for prompt in (known, known, [*known[:50], 3, 4], known):
                request = spec.engine.submit(prompt, max_new_tokens=12, eos_token_id=[])
                assert request.result().token_ids == greedy(plain, prompt, 12)
            assert request.stats.reused_tokens > 40 and request.stats.prefill_tokens < 20
        # Two at once: one of them gets a copy.
        requests = [spec.engine.submit([*known[:55], last], max_new_tokens=12, eos_token_id=[]) for last in (8, 9)]
        for request in requests:
            assert request.result().token_ids == greedy(plain, request.prompt, 12)
            assert request.stats.reused_tokens > 40


@pytest.mark.parametrize("along", [False, True], ids=["by itself", "along with steps"])
def test_a_long_prompt_beside_running_streams(along: bool) -> None:
    plain = tiny_llama()
    short, long = [random_prompt(9, seed=1), [5, 6, 7] * 4], random_prompt(150, seed=3)
    options = {} if along else {"prefill_budget": 32}
    with wrapped(tiny_llama().cuda(), "ngram", max_batch=3, max_len=192, **options) as spec:
        if along:
            always_mixes(spec)
        for tier in (0, 3):
            spec.set_tier(tier)
            requests = [spec.engine.submit(prompt, max_new_tokens=40, eos_token_id=[]) for prompt in short]
            while not all(len(request.new_tokens) > 3 for request in requests):
                spec.engine.step()
            requests.append(spec.engine.submit(long, max_new_tokens=20, eos_token_id=[]))
            texts = [request.result().token_ids for request in requests]
            assert texts == [greedy(plain, prompt, new) for prompt, new in ((short[0], 40), (short[1], 40), (long, 20))]
