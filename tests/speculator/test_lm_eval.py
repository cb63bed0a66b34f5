"""lm-eval's ``HFLM`` over a speculator gives the figures that it gives over the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
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


@pytest.fixture(autouse=True)
def no_machine_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval adds a description of the machine to its results, for which it runs pip and other programs."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM) -> Iterator[Speculator]:
    with speccompile.wrap(model, "ngram", tiers=(0, 3), max_len=64, backend="eager") as spec:
        yield spec


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Local tasks: one by log-likelihoods of choices, one by text up to a stop string."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "letters.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "doc_to_text": "text",
    }
    choose = {
        "task": "choose_letters",
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    write = {
        "task": "write_letters",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["fe"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    return [common | choose, common | write]


def evaluated(
    model: Any, letters: PreTrainedTokenizerFast, tasks: list[dict[str, Any]], batch_size: int
) -> tuple[Any, Any]:
    """The figures, and what the model answered to each request."""
    harness = HFLM(pretrained=model, tokenizer=letters, max_length=60, batch_size=batch_size)
    # lm-eval's own thousands of tasks would be read from their files, once for each call.
    manager = TaskManager(include_defaults=False)
    results = simple_evaluate(model=harness, tasks=tasks, task_manager=manager, bootstrap_iters=0)
    assert results is not None
    answers = {
        task: [(sample["resps"], sample["filtered_resps"]) for sample in samples]
        for task, samples in results["samples"].items()
    }
    return results["results"], answers


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
    assert set(figures) == {"choose_letters", "write_letters"}
    assert len(answers["write_letters"]) == len(DOCUMENTS)
    assert all(answers["write_letters"])
    assert torch.is_grad_enabled()
