"""lm-eval's ``HFLM`` over a speculator gives the figures that it gives over the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import speccompile
from speccompile import Speculator
from support.letters import tokenizer
from support.tiny import tiny_llama

DOCUMENTS = [
    {"text": "abcabcab", "choices": ["cab", "hgf", "a"], "gold": 0},
    {"text": "hgfedcba", "choices": ["bb", "cdcd", "e"], "gold": 1},
    {"text": "aabbaabb", "choices": ["aa", "bb", "ch"], "gold": 2},
]


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerFast:
    made = tokenizer()
    made.pad_token = made.eos_token = made.convert_ids_to_tokens(127)
    return made


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    model = tiny_llama()
    model.generation_config.pad_token_id = 127
    return model


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM) -> Iterator[Speculator]:
    with speccompile.wrap(model, "ngram", tiers=(0, 3), max_len=64, backend="eager") as spec:
        yield spec


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    # Imported here: lm-eval takes seconds, which a process that runs other tests need not spend.
    from support.lm_eval_tasks import local_tasks

    choose, write = local_tasks(tmp_path_factory.mktemp("tasks"), DOCUMENTS)
    return [
        choose | {"target_delimiter": "", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
        write | {"generation_kwargs": {"until": ["fe"], "max_gen_toks": 12, "do_sample": False}},
    ]


def evaluated(
    model: Any, letters: PreTrainedTokenizerFast, tasks: list[dict[str, Any]], batch_size: int
) -> tuple[Any, Any]:
    """See :func:`support.lm_eval_tasks.results_of`."""
    from lm_eval.models.huggingface import HFLM

    from support.lm_eval_tasks import results_of

    harness = HFLM(pretrained=model, tokenizer=letters, max_length=60, batch_size=batch_size)
    return results_of(harness, tasks)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_figures_and_answers_are_transformers(
    model: LlamaForCausalLM,
    spec: Speculator,
    letters: PreTrainedTokenizerFast,
    tasks: list[dict[str, Any]],
    batch_size: int,
) -> None:
    expected = evaluated(model, letters, tasks, batch_size)
    spec.stats.reset()
    got = evaluated(spec, letters, tasks, batch_size)
    assert spec.stats.emitted_tokens > 0
    assert got == expected
    figures, answers = got
    assert set(figures) == {"choose", "write"}
    assert len(answers["write"]) == len(DOCUMENTS)
    assert all(answers["write"])
    assert torch.is_grad_enabled()
