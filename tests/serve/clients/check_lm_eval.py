"""lm-eval's command line over ``speccompile serve smollm2`` gives what its ``hf`` model gives.

`make test-clients` runs it. lm-eval is that of the server's environment, which also has torch for the ``hf`` model.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.served_model import MODEL, PYTHON

SECONDS_TO_RUN = 200
DOCUMENTS = [
    {"text": "The capital of France is", "choices": ["Paris", "London", "Berlin, the"], "gold": 0},
    {"text": "Question: What is 2 + 2?\nAnswer:", "choices": ["3", "4", "five, or naïve é"], "gold": 1},
    {"text": "Water is made of hydrogen and", "choices": ["oxygen", "iron", "日本語の酸素"], "gold": 0},
    {"text": "Repeat: ab ab ab ab ab ab", "choices": ["ab", "a - b\n\n", "  spaced   out"], "gold": 0},
]
TASKS: dict[str, dict[str, Any]] = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_text": "text",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
    },
    "roll": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "write": {
        "output_type": "generate_until",
        "doc_to_text": "text",
        "doc_to_target": "gold",
        "generation_kwargs": {"until": ["\n\n", "Question:"], "max_gen_toks": 16, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tasks' files; a YAML file may be JSON."""
    made = tmp_path_factory.mktemp("tasks")
    data = made / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    for name, task in TASKS.items():
        (made / f"{name}.yaml").write_text(json.dumps(source | task | {"task": f"local_{name}"}))
    return made


def started(folder: Path, model: str, arguments: str, *options: str) -> subprocess.Popen[bytes]:
    tasks = [f"local_{name}" for name in TASKS]
    command = [PYTHON, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments, "--log_samples", *options]
    command += ["--include_path", str(folder), "--output_path", str(folder / model), "--tasks", *tasks]
    return subprocess.Popen(command, env=os.environ | {"HF_HOME": str(folder / model), "HF_HUB_OFFLINE": "1"})


def answers(folder: Path, model: str, run: subprocess.Popen[bytes]) -> dict[str, list[Any]]:
    """The model's answers by task, one list of a document's log-likelihoods or texts."""
    assert run.wait(SECONDS_TO_RUN) == 0
    found = {}
    for task in TASKS:
        (samples,) = (folder / model).rglob(f"samples_local_{task}_*.jsonl")
        lines = map(json.loads, samples.read_text().splitlines())
        found[task] = [line["filtered_resps"] for line in sorted(lines, key=lambda line: line["doc_id"])]
        assert len(found[task]) == len(DOCUMENTS)
    return found


def test_figures_and_texts_are_those_of_lm_evals_own_model(url: str, folder: Path) -> None:
    path = "from speccompile.pretrained.smollm2 import fetch_smollm2; print(fetch_smollm2())"
    checkpoint = subprocess.run([PYTHON, "-c", path], check=True, capture_output=True, text=True).stdout.strip()
    served = f"model={MODEL},base_url={url}/completions,num_concurrent=4"
    own = f"pretrained={checkpoint},dtype=float32"
    # Both at a time: most of either run is lm-eval's start.
    with (
        started(folder, "hf", own, "--device", "cpu") as one,
        started(folder, "local-completions", served, "--batch_size", "4") as other,
    ):
        wanted, got = answers(folder, "hf", one), answers(folder, "local-completions", other)
    assert got["write"] == wanted["write"]
    assert _greedy(got) == _greedy(wanted)
    assert _likelihoods(got) == pytest.approx(_likelihoods(wanted), abs=2e-4)


def _likelihoods(found: dict[str, list[Any]]) -> list[float]:
    """Of all choices, and of all whole texts. lm-eval writes them as texts."""
    choices = [float(likelihood) for document in found["choose"] for likelihood, _ in document]
    return choices + [float(likelihood) for (likelihood,) in found["roll"]]


def _greedy(found: dict[str, list[Any]]) -> list[str]:
    return [is_greedy for document in found["choose"] for _, is_greedy in document]
