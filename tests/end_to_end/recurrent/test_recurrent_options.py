"""Targets with recurrent state in half precision, with rounded and freed weights, from packages, and saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import speccompile
from speccompile import Speculator
from speccompile.hidden_states import SavedHiddenStates, SaveHiddenStates
from support.dice import Dice
from support.families import model_of, periodic
from support.our_kernels import our_kernels
from support.tiny import greedy

TIERS, NEW = (0, 3), 20
PROMPTS = [periodic(seed=2)[:30], periodic(seed=3)[:7], [9, 8, 7]]


@pytest.fixture(scope="module", autouse=True)
def backend() -> Iterator[None]:
    with our_kernels():
        yield


def wrapped(model: PreTrainedModel, **options: Any) -> Speculator:
    sizes: dict[str, Any] = {"tiers": TIERS, "max_batch": 2, "max_len": 63, "backend": "ours", "policy": Dice(TIERS)}
    return speccompile.wrap(model, "ngram", **(sizes | options))


def texts(spec: Speculator) -> list[list[int]]:
    requests = [spec.engine.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
    spec.engine.run()
    return [request.new_tokens for request in requests]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_in_half_precision_the_text_does_not_depend_on_tiers(name: str, dtype: torch.dtype) -> None:
    with wrapped(model_of(name, dtype=dtype), deterministic=True) as spec:
        state = [tensor for name, tensor in spec.arena.items() if name in spec.arena.layout.recurrent]
        # The number of tokens that it has absorbed is not a float.
        assert {tensor.dtype for tensor in state if tensor.is_floating_point()} == {torch.float32}
        assert spec.check(PROMPTS, max_new_tokens=NEW, reference="plain")
        assert texts(spec) == texts(spec)
        assert 0 < spec.stats.accepted_tokens < spec.stats.draft_tokens
        report = spec.check(PROMPTS, max_new_tokens=NEW)
        # What is almost undecided may be rounded to either side.
        assert report or report.largest_logit_change < 0.1


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "mamba"])
def test_with_rounded_weights_the_text_does_not_depend_on_tiers(name: str) -> None:
    with wrapped(model_of(name), weights="int8") as spec:
        assert "rounded to int8" in spec.explain()
        assert spec.check(PROMPTS, max_new_tokens=NEW, reference="plain")
        report = spec.check(PROMPTS, max_new_tokens=NEW)
        assert report or report.largest_logit_change < 0.1


def test_with_freed_originals_the_text_is_that_of_transformers() -> None:
    model = model_of("qwen3_next")
    expected = [greedy(model, prompt, NEW) for prompt in PROMPTS]
    with wrapped(model, free_originals=True) as spec:
        assert "originals freed" in spec.explain()
        assert texts(spec) == expected


def test_a_package_has_its_recurrences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3_next")
    path = tmp_path / "hybrid.spec"
    with wrapped(model, backend="eager", policy=None) as spec:
        spec.save(path)
    monkeypatch.setattr("speccompile.utils.storage.cache_dir", lambda: tmp_path / "empty")
    monkeypatch.setattr("speccompile.compiler.frontend.capture", lambda *args: pytest.fail("captured again"))
    with speccompile.load(path, model) as spec:
        spec.engine.policy = Dice(TIERS)
        assert texts(spec) == [greedy(model, prompt, NEW) for prompt in PROMPTS]


def test_hidden_states_are_saved_of_accepted_tokens_alone(tmp_path: Path) -> None:
    model, layers = model_of("qwen3_next"), (0,)
    saves = SaveHiddenStates(tmp_path, write_interval=1, eagle3_layers_to_capture=layers)
    with wrapped(model, save_hidden_states=saves) as spec:
        requests = [
            spec.engine.submit(prompt, max_new_tokens=NEW, record=str(number)) for number, prompt in enumerate(PROMPTS)
        ]
        spec.engine.run()
        assert 0 < spec.stats.accepted_tokens < spec.stats.draft_tokens
    for number, request in enumerate(requests):
        record, text = SavedHiddenStates(tmp_path)[str(number)], request.prompt + request.new_tokens
        assert record.input_ids.tolist() == text[:-1]
        with torch.no_grad():
            states = model(record.input_ids[None], output_hidden_states=True).hidden_states
        torch.testing.assert_close(record.hidden_state, states[-1][0], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(record.aux_hidden_state, states[1][0], rtol=1e-3, atol=1e-4)
