"""lm-eval's tasks from local files, and what a model makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager


def local_tasks(folder: Path, documents: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two tasks over ``documents`` with ``text``, ``choices`` and ``gold``: ``choose``, by log-likelihoods of choices,
    and ``write``, by text."""
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "doc_to_text": "text",
    }
    choose = {
        "task": "choose",
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
    }
    write = {
        "task": "write",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[gold]}}",
        "metric_list": [{"metric": "exact_match"}],
    }
    return common | choose, common | write


def rolling(task: dict[str, Any]) -> dict[str, Any]:
    """``roll``: the perplexity of the whole texts of another task's documents."""
    kept = {name: task[name] for name in ("dataset_path", "dataset_kwargs", "test_split")}
    metrics = [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]
    form = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text", "metric_list": metrics}
    return kept | form | {"task": "roll"}


def results_of(model: LM, tasks: list[dict[str, Any]], **options: Any) -> tuple[Any, Any]:
    """The figures, and what ``model`` answered to each request, by task; ``options`` of ``simple_evaluate``."""
    # lm-eval's own thousands of tasks would be read from their files, once for each call. It adds a description of the
    # machine to its results, for which it runs pip and other programs.
    manager = TaskManager(include_defaults=False)
    with mock.patch("lm_eval.evaluator.add_env_info", lambda results: None):
        results = simple_evaluate(model=model, tasks=tasks, task_manager=manager, bootstrap_iters=0, **options)
    assert results is not None
    answers = {
        task: [(sample["resps"], sample["filtered_resps"]) for sample in samples]
        for task, samples in results["samples"].items()
    }
    return results["results"], answers
