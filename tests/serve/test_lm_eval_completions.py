"""lm-eval's ``local-completions`` over the server gives what ``HFLM`` gives over the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from support import serving
from support.serving import Client

DOCUMENTS = [
    {"text": "the end of the", "choices": ["end", "name é", "12, the"], "gold": 0},
    {"text": '{"name": 12, ', "choices": ['"call"', "ab ab ab", "é"], "gold": 1},
    {"text": "ab", "choices": ["abab", "the the end", "x"], "gold": 2},
]
MAX_LEN = 200


@pytest.mark.parametrize(("batch", "concurrent"), [(1, 1), (2, 1), (1, 3)])
def test_log_likelihoods_and_texts_are_those_of_transformers(
    client: Client, target: LlamaForCausalLM, tmp_path: Path, batch: int, concurrent: int
) -> None:
    # Imported here: it takes seconds, which a process that runs other tests need not spend.
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from support.lm_eval_tasks import local_tasks, results_of

    tokenizer = serving.tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    choose, write = local_tasks(tmp_path, DOCUMENTS)
    tasks = [choose, write | {"generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16, "do_sample": False}}]
    expected = results_of(HFLM(pretrained=target, tokenizer=tokenizer, max_length=MAX_LEN), tasks)
    with serving.listening(client.service, lifespan="off") as address:
        remote = LocalCompletionsAPI(
            base_url=f"{address}/v1/completions",
            model=serving.MODEL,
            tokenizer=str(tmp_path / "tokenizer"),
            tokenizer_backend="huggingface",
            max_length=MAX_LEN,
            batch_size=batch,
            num_concurrent=concurrent,
        )
        got = results_of(remote, tasks)
    assert got[0]["choose"]["acc,none"] == expected[0]["choose"]["acc,none"]
    assert got[1]["write"] == expected[1]["write"]
    pairs = [pair for answers in zip(got[1]["choose"], expected[1]["choose"], strict=True) for pair in _pairs(*answers)]
    assert len(pairs) == 9
    for (likelihood, is_greedy), (wanted, wanted_greedy) in pairs:
        assert likelihood == pytest.approx(wanted, abs=1e-4) and is_greedy == wanted_greedy


def _pairs(one: Any, other: Any) -> list[Any]:
    """Log-likelihoods, and whether they are of greedy text, side by side."""
    return list(zip(one[1], other[1], strict=True))
