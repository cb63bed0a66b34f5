"""DFlash compiled by Inductor: sliding windows, int8 weights, bfloat16, and executables before the step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.heads import DFlashHead
from speccompile.lowering.kernel_list import DRAFTER
from support.dice import Dice
from support.tiny import random_prompt

TIERS, WINDOWS = (0, 3), (7, 4)
OPTIONS: dict[str, Any] = {"max_batch": 2, "max_len": 63, "backend": "inductor", "weights": "int8"}
#: Shorter and longer than the windows.
PROMPTS = [random_prompt(3, seed=1), random_prompt(41, seed=2)]
DRAWN: list[dict[str, Any]] = [{}, {"do_sample": True, "seed": 5, "temperature": 1.5, "top_k": 20}]
TINY = {"layers": 3, "dtype": torch.bfloat16}


VARIANTS: dict[str, dict[str, Any]] = {
    "DFlash": {},
    "DSpark": {"markov_rank": 8, "sample_from_anchor": True, "draft_vocab_size": 50},
}


@pytest.fixture(scope="module", params=VARIANTS)
def spec(model: LlamaForCausalLM, request: pytest.FixtureRequest) -> Iterator[Speculator]:
    sizes: dict[str, Any] = {"block_size": 4, "num_hidden_layers": 2, "taps": (0, 1), "windows": WINDOWS}
    head = DFlashHead.random(model, 3, **sizes, **VARIANTS[request.param])
    options = OPTIONS | {"tiers": TIERS, "policy": "fixed:3", "draft_weights": "int8", "fused": False}
    with wrap(model, "dflash", draft=head, **options) as made:
        yield made


@pytest.fixture(scope="module")
def texts(model: LlamaForCausalLM) -> list[list[int]]:
    """Without speculation, of each prompt, greedy and drawn."""
    with wrap(model, "none", tiers=(0,), **OPTIONS | {"max_batch": 1}) as plain:
        return [text for drawn in DRAWN for text in continued(plain, drawn)]


def continued(spec: Speculator, drawn: dict[str, Any]) -> list[list[int]]:
    requests = [spec.engine.submit(prompt, max_new_tokens=20, **drawn) for prompt in PROMPTS]
    return [request.result().token_ids for request in requests]


def test_layers_of_the_head_are_compiled(spec: Speculator) -> None:
    calls = spec.kernels(3)
    bodies = {call.name for call in calls if call.caller == DRAFTER and call.kind == "body"}
    assert len(bodies) == len(WINDOWS), "one for each window"
    for body in bodies:
        assert {"inductor", "c++"} <= {call.kind for call in calls if call.caller == body}
    assert spec.arena["drafter_k_0"].dtype == torch.bfloat16


@pytest.mark.parametrize("policy", ["largest", "mixed"])
def test_the_text_is_that_without_speculation(spec: Speculator, texts: list[list[int]], policy: str) -> None:
    spec.engine.policy = Dice(TIERS if policy == "mixed" else TIERS[-1:])
    spec.stats.reset()
    assert [text for drawn in DRAWN for text in continued(spec, drawn)] == texts
    assert spec.stats.draft_tokens > 50
