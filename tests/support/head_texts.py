"""Texts of ragged requests that come one after another, at random tiers."""

from __future__ import annotations

import random

from transformers import LlamaForCausalLM

from speccompile import Speculator
from support.dice import Dice
from support.engines import greedy
from support.tiny import random_prompt


def assert_greedy_texts(spec: Speculator, model: LlamaForCausalLM, rows: int) -> None:
    spec.engine.policy = Dice(list(spec.tiers), rows)
    rng = random.Random(rows)
    requests = []
    for row in range(rows):
        prompt = random_prompt(rng.choice([1, 2, 7, 33, 64, 90]), seed=10 * rows + row)
        requests.append(spec.engine.submit(prompt, max_new_tokens=rng.randint(5, 30)))
        for _ in range(rng.randint(0, 3)):
            spec.engine.step()
    spec.engine.run()
    for request in requests:
        assert request.new_tokens == greedy(model, request.prompt, request.params.max_new_tokens)
