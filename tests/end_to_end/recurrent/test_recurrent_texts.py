"""Targets with recurrent state: the text is that of transformers, whatever else runs."""

from __future__ import annotations

import random

import torch

from support.dice import Dice
from support.recurrent_targets import NEW, SLOTS, TIERS, Wrapped, cancelled_halfway, prompts


def test_batches_of_one_to_four_rows_have_the_text_of_transformers(target: Wrapped) -> None:
    """The fourth row waits for a slot."""
    known = prompts(4, seed=10)
    for rows in range(1, 5):
        batch = known[-rows:]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        expected = [target.expected(prompt) for prompt in batch]
        found = target.spec.generate(ids, attention_mask=mask, max_new_tokens=NEW)[:, width:]
        assert found.tolist() == expected


def test_sampled_text_does_not_depend_on_tiers_and_neighbours(target: Wrapped) -> None:
    engine, known = target.spec.engine, prompts(5, seed=11)
    asked = [
        {"ids": prompt, "max_new_tokens": NEW, "do_sample": True, "seed": seed, "temperature": 0.7, "top_k": 20}
        for seed, prompt in enumerate(known)
    ]
    target.spec.set_tier(0)
    expected = []
    for options in asked:
        expected.append(engine.submit(**options))
        engine.run()
    target.drafter.texts += [request.prompt + request.new_tokens for request in expected]
    engine.policy = Dice(TIERS, seed=2)
    target.spec.stats.reset()
    together = [engine.submit(**options) for options in asked]
    engine.run()
    assert [request.new_tokens for request in together] == [request.new_tokens for request in expected]
    assert any(request.new_tokens != target.expected(request.prompt) for request in expected)
    assert 0 < target.spec.stats.accepted_tokens < target.spec.stats.draft_tokens


def test_two_hundred_requests_over_three_slots_have_the_text_of_transformers(target: Wrapped) -> None:
    """Some are cancelled, in the middle of their prompts too."""
    choose, engine, known = random.Random(4), target.spec.engine, prompts(8, seed=5)
    requests = [engine.submit(choose.choice(known), max_new_tokens=choose.randint(1, 8)) for _ in range(200)]
    leaving = choose.sample(requests, 50)
    while not engine.idle:
        engine.step()
        if leaving and choose.random() < 0.3:
            leaving.pop().cancel()
    for request in requests:
        expected = target.expected(request.prompt)[: request.params.max_new_tokens]
        assert request.new_tokens == expected[: len(request.new_tokens)]
        assert request.finish_reason == "cancelled" or request.new_tokens == expected
    assert sum(request.finish_reason == "cancelled" for request in requests) >= 20


def test_a_prompt_that_is_cancelled_halfway_leaves_nothing(target: Wrapped) -> None:
    engine, choose = target.spec.engine, random.Random(12)
    for _ in range(SLOTS):
        cancelled_halfway(target, choose.choices(range(5, 100), k=44))
    prompt = prompts(1, seed=12)[0]
    expected = target.expected(prompt)
    following = [engine.submit(prompt, max_new_tokens=NEW) for _ in range(SLOTS)]
    engine.run()
    assert all(request.new_tokens == expected for request in following)
