"""Log-probabilities of prompts and texts on a GPU are those of the model's forward on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.gpu_texts import PROMPTS, wrapped
from support.tiny import tiny_llama

pytestmark = pytest.mark.gpu

ALL: dict[str, Any] = {"logprobs": True, "prompt_logprobs": True, "top_logprobs": 3, "output_logits": True}


@pytest.mark.parametrize("mode", ["ngram", "early_exit"])
def test_scores(mode: str) -> None:
    plain, options = tiny_llama(), {"exit_layer": 1} if mode == "early_exit" else {}
    with wrapped(tiny_llama().cuda(), mode, scores=True, **options) as spec:
        for tier in (0, 3):
            spec.set_tier(tier)
            requests = [spec.engine.submit(prompt, max_new_tokens=12, eos_token_id=[], **ALL) for prompt in PROMPTS]
            for prompt, request in zip(PROMPTS, requests, strict=True):
                result, start = request.result(), len(prompt)
                text = torch.tensor(prompt + result.token_ids)
                with torch.no_grad():
                    logits = plain(text[None]).logits[0, :-1]
                wanted = logits.log_softmax(-1)
                following = wanted.gather(-1, text[1:, None])[:, 0]
                assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
                close(torch.tensor(result.prompt_logprobs[1:]), following[: start - 1])
                close(torch.tensor(result.logprobs), following[start - 1 :])
                assert result.logits is not None and result.top_logprobs is not None
                close(result.logits.cpu(), logits[start - 1 :])
                best = torch.tensor([[value for _, value in top] for top in result.top_logprobs])
                close(best, wanted[start - 1 :].topk(3).values)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
