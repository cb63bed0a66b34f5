"""The thread that trains a draft head ends with its speculator, and stays with the process that began it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.errors import InvalidOption
from speccompile.heads import Eagle3Head
from speccompile.training import OnlineTraining
from speccompile.training.online_learner import OnlineLearner
from support.errors import raises
from support.forks import PATIENCE, in_child
from support.tiny import greedy
from support.training_data import TAPS, VOCAB

PROMPT, NEW = [5, 6, 7], 20
LEARN = OnlineTraining(share=1.0, ring_tokens=4096, judge_tokens=32, judge_every=2, unroll=2)


def learning(model: LlamaForCausalLM) -> Speculator:
    head = Eagle3Head.random(model, taps=TAPS, draft_vocab_size=VOCAB)
    sizes: dict[str, Any] = {"tiers": (0, 2), "max_len": 48, "max_batch": 2, "backend": "eager", "policy": "fixed:2"}
    return wrap(model, "eagle3_one_model", draft=head, learn=LEARN, **sizes)


def learner_of(spec: Speculator) -> OnlineLearner:
    learner = spec.learner
    assert isinstance(learner, OnlineLearner)
    return learner


def text_of(spec: Speculator) -> list[int]:
    return spec.generate(torch.tensor([PROMPT]), max_new_tokens=NEW)[0, len(PROMPT) :].tolist()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "speccompile-learn"]


def wait_for_steps(spec: Speculator, more_than: int) -> None:
    """Serve until the thread has made more training steps than that."""
    learner, until = learner_of(spec), time.monotonic() + PATIENCE
    while learner._steps <= more_than:
        assert time.monotonic() < until and learner.error is None, learner.error
        text_of(spec)


class Held:
    """Training steps that begin and do not go on until they are let go."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()
        step = OnlineLearner._step

        def held(learner: OnlineLearner) -> bool:
            self.begun.set()
            assert self.let_go.wait(2 * PATIENCE)
            return step(learner)

        patch.setattr(OnlineLearner, "_step", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(monkeypatch)
    yield held
    held.let_go.set()


def test_closing_ends_the_training_and_its_thread(model: LlamaForCausalLM) -> None:
    spec = learning(model)
    learner = learner_of(spec)
    assert threads() == ["speccompile-learn"]
    wait_for_steps(spec, more_than=2)
    spec.close()
    assert threads() == [] and learner.error is None


def test_closing_again_does_nothing(model: LlamaForCausalLM) -> None:
    spec = learning(model)
    engine = spec.engine
    for close in (spec.close, spec.close, engine.close, engine.training.close):
        close()
        assert threads() == []


def test_closing_waits_for_the_training_step_that_runs(model: LlamaForCausalLM, held: Held) -> None:
    spec = learning(model)
    assert held.begun.wait(PATIENCE)
    closing = threading.Thread(target=spec.engine.training.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive() and threads() == ["speccompile-learn"]
    held.let_go.set()
    closing.join(PATIENCE)
    assert not closing.is_alive() and threads() == []
    spec.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_decodes_and_does_not_learn(model: LlamaForCausalLM, held: Held) -> None:
    """Forked in a training step, whose lock no thread of the child would release."""
    with learning(model) as spec:
        assert held.begun.wait(PATIENCE)

        def child() -> list[Any]:
            text = text_of(spec)
            with raises(InvalidOption, name="learn"):
                spec.learn(1)
            with raises(InvalidOption, name="learn"):
                spec.save_head("head")
            spec.close()
            return [text, threads()]

        assert in_child(child) == repr([greedy(model, PROMPT, NEW), []])
        # The parent goes on.
        held.let_go.set()
        wait_for_steps(spec, more_than=0)
        assert threads() == ["speccompile-learn"]
    assert threads() == []
