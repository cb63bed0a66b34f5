"""A processor registered from outside: options, state and op in every step, with drafts, and no file of the package."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, LogitsProcessor

import speccompile
from speccompile import Speculator, sampling
from speccompile.errors import ForeignPackage, InvalidOption, UnknownOption
from speccompile.runtime.request_options import GenerateOptions, SubmitOptions
from speccompile.sampling import N, Option, Processor, StateSpec, pipeline, whole
from speccompile.sampling.register import ARGUMENTS
from support.errors import raises
from support.own_processors import processor_registry

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_processor.py"
SIZES: dict[str, Any] = {"tiers": (0, 1, 3), "max_len": 64, "max_batch": 2, "backend": "eager", "policy": "fixed:3"}
PROMPT = [5, 17, 5, 17, 5, 17, 5]


class MaxCount(LogitsProcessor):
    """The same as the example, for transformers."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row, ids in zip(scores, input_ids, strict=True):
            row[ids.bincount(minlength=len(row)) >= self.limit] = -float("inf")
        return scores


TINY = {"vocab": 32}


@pytest.fixture(scope="module")
def before(model: LlamaForCausalLM) -> Iterator[Speculator]:
    """Wrapped before the example's processor is registered."""
    with speccompile.wrap(model, "ngram", **SIZES) as spec:
        yield spec


@pytest.fixture(scope="module")
def registered(before: Speculator) -> Iterator[None]:
    with processor_registry({}):
        runpy.run_path(str(EXAMPLE))
        yield


@pytest.fixture
def own_registry(registered: None) -> Iterator[None]:
    """Forget the processors that a test registers, except the example's."""
    with processor_registry({name: list(items) for name, items in pipeline.REGISTERED.items()}):
        yield


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM, registered: None) -> Iterator[Speculator]:
    with speccompile.wrap(model, "ngram", **SIZES) as spec:
        yield spec


@pytest.mark.parametrize("limit", [3, 4, 6])
def test_the_text_is_that_of_transformers_with_such_a_processor_and_drafts_are_accepted(
    spec: Speculator, model: LlamaForCausalLM, limit: int
) -> None:
    ids = torch.tensor([PROMPT])
    rules = {"max_new_tokens": 40, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, logits_processor=[MaxCount(limit)], **rules)
    spec.stats.reset()
    assert torch.equal(spec.generate(ids, max_new_tokens=40, max_count=limit), expected)
    assert spec.stats.accepted_tokens > 0
    assert not torch.equal(spec.generate(ids, max_new_tokens=40), expected), "the processor had nothing to forbid"


def test_sampled_text_does_not_depend_on_the_tier(spec: Speculator) -> None:
    texts = []
    for tier in (0, 1, 3):
        spec.set_tier(tier)
        request = spec.engine.submit(PROMPT, max_new_tokens=30, do_sample=True, seed=3, max_count=4)
        texts.append(request.result().token_ids)
    spec.set_tier(3)
    assert texts[0] == texts[1] == texts[2]
    assert max(torch.tensor(PROMPT + texts[0]).bincount().tolist()) <= 4


def test_its_option_is_checked_and_told_among_the_known_ones(spec: Speculator) -> None:
    with raises(InvalidOption, where="submit", name="max_count", value=0):
        spec.engine.submit(PROMPT, max_count=0)
    with raises(UnknownOption, known=re.compile(r"\bmax_count\b")):
        spec.engine.submit(PROMPT, max_counts=3)


def test_stages_show_its_op_in_its_place(spec: Speculator) -> None:
    source = spec.pipeline(3, kind="sampled").run(spec.stages["outline"].graph)[1].last.python
    assert source.index("'frequency_penalty'") < source.index("'max_count'") < source.index("'bad_words'")


def test_a_model_wrapped_before_takes_the_option_after_a_rebuild(before: Speculator, registered: None) -> None:
    with raises(InvalidOption, where="submit", name="max_count"):
        before.engine.submit(PROMPT, max_count=3)
    assert before.generate(torch.tensor([PROMPT]), max_new_tokens=4).shape[1] == len(PROMPT) + 4
    before.rebuild()
    assert before.engine.submit(PROMPT, max_count=3, max_new_tokens=4).result().token_ids


def test_a_package_is_loaded_with_the_same_processors_only(
    spec: Speculator, model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec.save(tmp_path / "package")
    with speccompile.load(tmp_path / "package", model) as loaded:
        texts = [one.engine.submit(PROMPT, max_count=3, max_new_tokens=9).result().token_ids for one in (loaded, spec)]
        assert texts[0] == texts[1]
    monkeypatch.setattr(pipeline, "REGISTERED", {})
    with raises(ForeignPackage, what="registered processors", theirs=["max_count"], ours=[]):
        speccompile.load(tmp_path / "package", model)


def test_arguments_of_calls_are_no_names_of_options() -> None:
    names = {name for options in (SubmitOptions, GenerateOptions) for name in (*options.names(), *options.inputs)}
    assert names | {"self", "options"} == ARGUMENTS


class Never(Processor):
    """Forbids one token."""

    name, options = "never", (Option("never", whole(0)),)
    state = (StateSpec("never", (N,), torch.int64, fill=-1),)

    def place(self, values: Any, prompt_length: int) -> dict[str, Any]:
        return {"never": values["never"]}

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        scores[torch.arange(len(scores)), :, state[0]] = -float("inf")


class Always(Never):
    """The opposite, by the same name."""

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        scores[torch.arange(len(scores)), :, state[0]] = 1e9


@pytest.mark.usefixtures("own_registry")
def test_a_processor_takes_the_place_of_one_of_its_name(model: LlamaForCausalLM) -> None:
    sampling.register_processor(Never(), after="max_count")
    with raises(InvalidOption, where="register_processor", name="processor"):
        sampling.register_processor(Always(), after="max_count")
    with speccompile.wrap(model, "none", **{**SIZES, "tiers": (0,), "policy": None}) as spec:
        plain = spec.engine.submit(PROMPT, max_new_tokens=3).result().token_ids
        without = spec.engine.submit(PROMPT, max_new_tokens=3, never=plain[0]).result().token_ids
        assert without[0] != plain[0]
        sampling.register_processor(Always(), after="top_k", replace=True)
        assert [item.name for item in pipeline.registered_processors()] == ["max_count", "never"]
        spec.rebuild()
        assert spec.engine.submit(PROMPT, max_new_tokens=3, never=9).result().token_ids == [9, 9, 9]


class Stateless(Processor):
    name, options, state = "stateless", (), ()

    def place(self, values: Any, prompt_length: int) -> dict[str, Any]:
        return {}

    def apply(self, *tensors: torch.Tensor) -> None:
        pass


class SameName(Stateless):
    name, state = "top_k", (StateSpec("mine", (N,), torch.int64),)


class SameOption(SameName):
    name, options = "mine", (Option("top_k", whole(0)),)


class SameState(SameName):
    name, state = "mine", (StateSpec("top_k", (N,), torch.int64),)


class Fine(SameName):
    name = "mine"


class CoreState(SameName):
    name, state = "mine", (StateSpec("tokens", (N,), torch.int64),)


class Argument(Fine):
    options = (Option("seed", whole(0)),)


class TwoOfOneName(Fine):
    options = (Option("mine", whole(0)), Option("mine", whole(1)))


class NoName(Fine):
    name = "top k!"


class OpOfOurs(Fine):
    name = "truncate_trees"


class NoOptions(Fine):
    options = None  # type: ignore[assignment]


class ReadsNothing(Fine):
    reads = ("nothing",)


@pytest.mark.parametrize(
    ("processor", "after", "field"),
    [
        (Stateless(), "top_k", "processor"),
        (SameName(), "top_k", "processor"),
        (SameOption(), "top_k", "processor"),
        (SameState(), "top_k", "processor"),
        (Stateless, "top_k", "processor"),
        *((kind(), "top_k", "processor") for kind in (CoreState, Argument, TwoOfOneName, NoName, OpOfOurs, NoOptions)),
        (ReadsNothing(), "top_k", "processor"),
        (Fine(), "logits_processor", "after"),
        (Fine(), "nowhere", "after"),
    ],
)
def test_what_cannot_be_registered_is_refused(processor: Any, after: str, field: str) -> None:
    with raises(InvalidOption, where="register_processor", name=field):
        sampling.register_processor(processor, after=after)
    assert processor not in pipeline.registered_processors()
