"""Speculators in forked processes, and copies of them."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import speccompile
from speccompile import Speculator
from speccompile.errors import CannotCopy, Closed, ForkedSpeculator
from speccompile.hidden_states import SaveHiddenStates
from speccompile.utils.build_lock import one_build
from support.errors import raises
from support.forks import PATIENCE, in_child
from support.tiny import greedy, random_prompt, tiny_llama

PROMPT = random_prompt(9, seed=1)
NEW = 12

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


def wrapped(**options: Any) -> Speculator:
    given: dict[str, Any] = {"tiers": (0,), "max_len": 64, "backend": "eager"} | options
    return speccompile.wrap(tiny_llama(), **given)


@pytest.fixture(scope="module")
def spec() -> Iterator[Speculator]:
    with wrapped(max_batch=2) as spec:
        yield spec


@pytest.fixture
def two_threads() -> Iterator[None]:
    """With one, no operation is parallel, and nothing could hang."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    run_in_parallel()
    yield
    torch.set_num_threads(before)


def run_in_parallel() -> float:
    return float((torch.ones(700, 700) @ torch.ones(700, 700)).sum() + torch.ones(2**20).add(1).sum())


def text_of(spec: Speculator, **options: Any) -> list[int]:
    return spec.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, **options)[0, len(PROMPT) :].tolist()


@pytest.mark.usefixtures("two_threads")
def test_a_forked_child_decodes_and_so_does_its_parent(spec: Speculator) -> None:
    expected = greedy(tiny_llama(), PROMPT, NEW)
    assert text_of(spec) == expected
    assert in_child(lambda: (text_of(spec), run_in_parallel())) == repr((expected, run_in_parallel()))
    assert text_of(spec) == expected


@pytest.mark.usefixtures("two_threads")
def test_a_forked_child_wraps(spec: Speculator) -> None:
    assert text_of(spec) == greedy(tiny_llama(), PROMPT, NEW)
    assert in_child(lambda: text_of(wrapped())) == repr(text_of(spec))


def test_a_child_does_not_wait_for_threads_of_its_parent() -> None:
    """A thread that serves, and one that builds."""
    built = threading.Event()

    def builds() -> None:
        with one_build():
            built.wait(PATIENCE)

    other = wrapped()
    threads = [threading.Thread(target=builds), threading.Thread(target=other.engine.serve, daemon=True)]
    for thread in threads:
        thread.start()
    while not (other.engine.loop._released and other.engine.idle):
        time.sleep(0.01)
    try:
        said = in_child(lambda: (text_of(other), len(text_of(other, do_sample=True, seed=1))))
    finally:
        built.set()
    assert said == repr((greedy(tiny_llama(), PROMPT, NEW), NEW))
    other.close()
    for thread in threads:
        thread.join(PATIENCE)


def test_forked_in_the_middle_of_a_step_it_says_so_at_once(spec: Speculator) -> None:
    said: list[str] = []

    def submit() -> Any:
        return spec.engine.submit(PROMPT)

    class Forks:
        def put(self, value: torch.Tensor) -> None:
            if not said:
                said.extend([in_child(lambda: text_of(spec)), in_child(submit), in_child(spec.close)])

        def end(self) -> None:
            pass

    ids = torch.tensor([PROMPT])
    spec.generate(ids, max_new_tokens=NEW, streamer=Forks())
    for line in said[:2]:
        assert line.startswith(f"{ForkedSpeculator.__name__}: ") and "a step was running" in line
        assert "Call wrap in this process" in line and "spawn" in line
    assert said[2] == "None"


def test_a_child_writes_no_records(tmp_path: Path) -> None:
    with wrapped(save_hidden_states=SaveHiddenStates(tmp_path, eagle3_layers_to_capture=(0,))) as spec:
        assert "both processes would write the same files" in in_child(lambda: text_of(spec))


# --- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps, lambda spec: pickle.dumps([spec])])
def test_a_copy_is_refused_and_save_is_named(spec: Speculator, copied: Callable[[Speculator], Any]) -> None:
    with raises(CannotCopy):
        copied(spec)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_of_the_engine_is_refused_too(spec: Speculator, copied: Callable[[Any], Any]) -> None:
    with raises(CannotCopy):
        copied(spec.engine)


def test_its_repr_says_what_it_is() -> None:
    spec = wrapped(tiers=(0, 3), max_batch=2)
    shown = "<Speculator of LlamaForCausalLM: mode 'ngram', tiers (0, 3), backend 'eager', 2 slots>"
    assert repr(spec) == shown
    spec.close()
    assert repr(spec) == "<Speculator of LlamaForCausalLM, closed>"
    with pytest.raises(Closed):
        spec.generate(torch.tensor([PROMPT]))
