"""A user's own logits processors, and speculators with them, for the tests of both."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import LlamaForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from speccompile import Speculator, wrap
from support.tiny import tiny_llama

VOCAB = 128
MAX_LEN = 60
#: One token, a period, and text.
PROMPTS = ([9], [5, 17, 5, 17, 5, 17, 5], list(range(30, 52)))
NEW = 20


@cache
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=VOCAB)


def normal(*shape: int) -> torch.Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(1))


class TensorBias(LogitsProcessor):
    """Holds a tensor, and writes in place."""

    def __init__(self) -> None:
        self.bias = normal(VOCAB)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, [1, 2, 3]] = -float("inf")
        scores += self.bias
        return scores


class AfterLast(LogitsProcessor):
    """A table of what may follow what."""

    def __init__(self) -> None:
        self.table = normal(VOCAB, VOCAB)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + self.table[input_ids[:, -1]]


class NoSum(LogitsProcessor):
    """Looks at the last two tokens, so that a text of one is too short."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        banned = (input_ids[:, -2] + torch.arange(100)[:, None] + input_ids[:, -1]).T % VOCAB
        return scores.scatter(1, banned, -float("inf"))


class Once(LogitsProcessor):
    """No token that was among the last 40 comes again; prepares itself in its first call."""

    scale: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = torch.full((1,), 100.0)
        recent = input_ids[:, -40:] if input_ids.shape[1] > 40 else input_ids
        return scores - self.scale * torch.zeros_like(scores).scatter(1, recent, 1.0)


def fold(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """No order of this and another processor may be changed."""
    return torch.where(scores > 1.5, scores - 3.0, scores)


MAKE: dict[str, Callable[[], list[Any]]] = {
    "sequence bias": lambda: [
        hf.SequenceBiasLogitsProcessor([[[i, i ^ (i % 2 * 2 + 1)], 6.0] for i in range(VOCAB)] + [[[4], 2.0]])
    ],
    "temperature": lambda: [hf.TemperatureLogitsWarper(0.5), fold],
    "tensor": lambda: [TensorBias()],
    "last token": lambda: [AfterLast()],
    "several": lambda: [Once(), TensorBias(), hf.RepetitionPenaltyLogitsProcessor(1.2), fold, AfterLast()],
}
MODES: dict[str, dict[str, Any]] = {"ngram": {}, "early_exit": {"exit_layer": 1}}


@cache
def spec_of(name: str, mode: str) -> Speculator:
    """Of two rows, so that a third request waits. Of ``several``, of four, so that one is dead, and at more tiers.

    Those of ``early_exit`` are the same rows and widths, of which one mode is enough.
    """
    more: dict[str, Any] = {"max_batch": 4, "tiers": (0, 1, 3)} if (name, mode) == ("several", "ngram") else {}
    return wrapped(MAKE[name](), mode, **more)


def wrapped(processors: Any, mode: str = "ngram", **options: Any) -> Speculator:
    sizes: dict[str, Any] = {"tiers": (0, 3), "max_batch": 2, "max_len": MAX_LEN, "backend": "eager"}
    sizes["policy"] = f"fixed:{max((sizes | options)['tiers'])}"
    return wrap(model(), mode, logits_processor=processors, **(sizes | MODES.get(mode, {}) | options))


def of_transformers(prompt: list[int], processors: list[Any], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    output = model().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        logits_processor=LogitsProcessorList(processors),
        **({"do_sample": False} | options),
    )
    return output[0, len(prompt) :].tolist()


def new_tokens(spec: Speculator, prompts: tuple[list[int], ...] = PROMPTS, **options: Any) -> list[list[int]]:
    """Of all prompts, together as far as there are slots."""
    requests = [spec.engine.submit(prompt, max_new_tokens=NEW, **options) for prompt in prompts]
    return [request.result().token_ids for request in requests]
