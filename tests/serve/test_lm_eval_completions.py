"""lm-eval's ``local-completions`` and ``local-chat-completions`` over the server give what ``HFLM`` gives over the
model."""

from __future__ import annotations

import copy
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


@pytest.fixture
def tasks(tmp_path: Path) -> list[dict[str, Any]]:
    # Imported here: lm-eval takes seconds, which a process that runs other tests need not spend.
    from support.lm_eval_tasks import local_tasks, rolling

    choose, write = local_tasks(tmp_path, DOCUMENTS)
    writing = {"generation_kwargs": {"until": ["\n\n", "é"], "max_gen_toks": 16, "do_sample": False}}
    return [choose, rolling(choose), write | writing]


def reference(target: LlamaForCausalLM) -> Any:
    """lm-eval's own way to run ``target``. It gives its tokenizer a token for padding."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=target, tokenizer=copy.deepcopy(serving.tokenizer()), max_length=MAX_LEN)


@pytest.mark.parametrize(
    ("tokenizer", "batch", "concurrent"), [("local", 1, 1), ("local", 2, 1), ("local", 2, 3), ("server's", 1, 1)]
)
def test_log_likelihoods_and_texts_are_those_of_transformers(
    client: Client,
    target: LlamaForCausalLM,
    tmp_path: Path,
    tasks: list[dict[str, Any]],
    tokenizer: str,
    batch: int,
    concurrent: int,
) -> None:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from support.lm_eval_tasks import results_of

    serving.tokenizer().save_pretrained(tmp_path / "tokenizer")
    local = {"tokenizer": str(tmp_path / "tokenizer"), "tokenizer_backend": "huggingface"}
    expected = results_of(reference(target), tasks)
    with serving.listening(client.service, lifespan="off") as address:
        remote = LocalCompletionsAPI(
            base_url=f"{address}/v1/completions",
            model=serving.MODEL,
            max_length=MAX_LEN,
            batch_size=batch,
            num_concurrent=concurrent,
            **(local if tokenizer == "local" else {}),
        )
        assert remote.tokenizer_backend == ("huggingface" if tokenizer == "local" else "remote")
        got = results_of(remote, tasks)
    assert got[0]["choose"]["acc,none"] == expected[0]["choose"]["acc,none"]
    for figure in ("word_perplexity,none", "bits_per_byte,none"):
        assert got[0]["roll"][figure] == pytest.approx(expected[0]["roll"][figure], rel=1e-4)
    assert got[1]["write"] == expected[1]["write"]
    pairs = [pair for answers in zip(got[1]["choose"], expected[1]["choose"], strict=True) for pair in _pairs(*answers)]
    assert len(pairs) == 9
    for (likelihood, is_greedy), (wanted, wanted_greedy) in pairs:
        assert likelihood == pytest.approx(wanted, abs=1e-4) and is_greedy == wanted_greedy


def test_texts_of_chats_are_those_of_transformers(
    client: Client, target: LlamaForCausalLM, tasks: list[dict[str, Any]]
) -> None:
    from lm_eval.models.openai_completions import LocalChatCompletion

    from support.lm_eval_tasks import results_of

    write = tasks[-1:]
    expected = results_of(reference(target), write, apply_chat_template=True)
    with serving.listening(client.service, lifespan="off") as address:
        remote = LocalChatCompletion(base_url=f"{address}/v1/chat/completions", model=serving.MODEL, num_concurrent=3)
        assert results_of(remote, write, apply_chat_template=True)[1] == expected[1]
    assert any(answer for answers in expected[1]["write"] for answer in answers[1])


def _pairs(one: Any, other: Any) -> list[Any]:
    """Log-likelihoods, and whether they are of greedy text, side by side."""
    return list(zip(one[1], other[1], strict=True))
