"""Texts that slots hold: made, distinguished, and looked for."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

import speccompile
from speccompile import Speculator
from speccompile.runtime.request import Request
from support.families import model_of
from support.tiny import tiny_llama

VOCAB = 128
MAX_BATCH = 3
MAX_LEN = 256
FAMILIES = [("llama", "ngram"), ("llama", "early_exit")]
# Attention of the model's own; sliding windows with and without a soft cap.
FAMILIES += [("bloom", "early_exit"), ("falcon", "ngram"), ("mistral", "early_exit"), ("gemma2", "ngram")]


def wrap(model: PreTrainedModel, mode: str = "none", **options: Any) -> Speculator:
    defaults: dict[str, Any] = {"tiers": (0,) if mode == "none" else (0, 3), "max_batch": MAX_BATCH}
    # How prompts are cut does not depend on the clock.
    defaults |= {"max_len": MAX_LEN, "backend": "eager", "prefill_budget": 64}
    defaults["policy"] = f"fixed:{max((defaults | options)['tiers'])}"
    return speccompile.wrap(model, mode, **(defaults | options))


def of_family(name: str) -> PreTrainedModel:
    return tiny_llama(vocab=VOCAB) if name == "llama" else model_of(name)


def forget(spec: Speculator) -> None:
    """Let short texts that begin like no other take the place of all that is known."""
    requests = [spec.engine.submit([0, slot], max_new_tokens=1) for slot in range(MAX_BATCH)]
    spec.engine.run()
    assert sorted(request.slot for request in requests) == list(range(MAX_BATCH))


def prompt(length: int, seed: int) -> list[int]:
    """Texts of different seeds share no beginning."""
    rest = torch.randint(VOCAB, (length - 1,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [1 + seed, *rest]


def decoded(spec: Speculator, prompt: list[int], new: int, **arguments: Any) -> Request:
    request = spec.engine.submit(prompt, max_new_tokens=new, **arguments)
    spec.engine.run()
    return request


def shared_beginning(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def read_and_reused(request: Request) -> tuple[int, int]:
    return request.stats.prefill_tokens, request.stats.reused_tokens


def assert_taken_over(request: Request, known: int) -> None:
    """The KV of the first ``known`` tokens was there, and the rest was read, if only, of the last one, by a step."""
    unread = len(request.prompt) - sum(read_and_reused(request))
    assert request.stats.reused_tokens == known
    assert unread in ((0, 1) if known else (0,))
    # Prefill emits the first token, if it comes to the prompt's end.
    assert len(request.new_tokens) - request.stats.emitted_tokens == 1 - unread
