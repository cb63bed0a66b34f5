"""What a wrap builds after its first attempt failed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import speccompile
from speccompile import Adapters
from speccompile.errors import Degraded, InvalidOption
from speccompile.ops.cpu import library
from support.families import model_of
from support.our_kernels import our_kernels
from support.plans import planned
from support.tiny import greedy, random_prompt, tiny_llama

OPTIONS: dict[str, Any] = {"tiers": (0, 2), "max_len": 40}


@pytest.fixture
def failing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A backend for whose C++ ops all libraries can be built but one."""
    name, load = request.param, library.load_cpu_ops

    def load_others(*libraries: str) -> str | None:
        return "the C++ compiler failed: no memory" if name in libraries else load(*libraries)

    for user in ("kernels", "stage_ops"):
        monkeypatch.setattr(f"speccompile.lowering.{user}.load_cpu_ops", load_others)
    with our_kernels() as backend:
        yield backend


@pytest.mark.parametrize(
    ("failing", "model", "options"),
    [
        ("lora", tiny_llama(), {"adapters": Adapters(1)}),
        ("recurrence", model_of("mamba"), {}),
    ],
    indirect=["failing"],
)
def test_without_a_library_that_a_model_needs_all_of_it_runs_on_torchs_own(
    failing: str, model: PreTrainedModel, options: dict[str, Any]
) -> None:
    prompt = random_prompt(9, vocab=model.config.vocab_size)
    with (
        pytest.warns(Degraded, match="the C\\+\\+ compiler failed: no memory"),
        speccompile.wrap(model, "ngram", backend=failing, **OPTIONS, **options) as spec,
    ):
        assert "torch's own: the C++ compiler failed: no memory" in spec.explain()
        assert spec.generate(torch.tensor([prompt]), max_new_tokens=12)[0, 9:].tolist() == greedy(model, prompt, 12)


@pytest.mark.parametrize("failing", ["rounded"], indirect=True)
def test_without_the_library_of_rounded_weights_they_are_refused_before_the_capture(failing: str) -> None:
    with pytest.warns(Degraded), pytest.raises(InvalidOption) as refused:
        planned(tiny_llama(), "none", weights="int8", backend=failing, **OPTIONS)
    assert refused.value.fields["name"] == "weights" and "no memory" in refused.value.fields["reason"]
