"""Parts of a training: draft vocabulary, batches, counts of accepted drafts, options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from speccompile.errors import InvalidOption
from speccompile.training import Acceptance, OnlineTraining, TrainOptions, loop, train_head
from speccompile.training.acceptance import DraftCounts
from speccompile.training.batches import plan_batches
from speccompile.training.draft_vocab import default_size, most_frequent
from speccompile.training.examples import Example, Examples
from support.docstrings import paragraphs
from support.errors import raises


def test_the_draft_vocabulary_is_the_most_frequent_tokens_and_those_that_must_be_there() -> None:
    counts = torch.tensor([5, 0, 9, 5, 1, 0])
    assert most_frequent(counts, 3).tolist() == [0, 2, 3]
    assert most_frequent(counts, 3, always=[5, 77, -1]).tolist() == [0, 2, 5]
    assert most_frequent(counts, 5).tolist() == [0, 1, 2, 3, 4]
    assert (default_size(49152), default_size(16384), default_size(100)) == (8192, 16384, 100)


def test_batches_have_each_text_once_and_hold_their_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 200, (500,), generator=generator).tolist()
    batches = plan_batches(lengths, 512, seed=3)
    assert sorted(index for batch in batches for index in batch) == list(range(500))
    padded = [len(batch) * max(lengths[index] for index in batch) for batch in batches]
    assert max(padded) <= 512 and sum(padded) < 1.15 * sum(lengths)
    assert batches == plan_batches(lengths, 512, seed=3) != plan_batches(lengths, 512, seed=4)
    assert plan_batches([900, 3], 512, seed=0) == [[0], [1]]


def test_held_out_texts_stay_held_out_when_texts_are_added() -> None:
    def examples(count: int) -> Examples:
        ids, mask = torch.zeros(3, dtype=torch.int32), torch.ones(3, dtype=torch.bool)
        return Examples(tuple(Example(str(number), ids, mask) for number in range(count)), ("Model 0",))

    held = [{item.name for item in examples(count).split(0.1)[1].items} for count in (200, 1000)]
    assert held[0] == {name for name in held[1] if int(name) < 200} and 60 < len(held[1]) < 140
    kept, one = examples(2).split(0.0)
    assert (len(kept), len(one)) == (1, 1)


def test_a_draft_is_judged_while_the_text_goes_on_with_those_before() -> None:
    counts = DraftCounts()
    rows = torch.tensor([[True, True, True, False]])
    chosen = torch.tensor([[4, 5, 6, 7]])
    # The third row's text was sampled: it does not go on with the target's choice.
    counts.add(rows, torch.tensor([[4, 9, 6, 7]]), chosen, torch.tensor([[4, 5, 0, 7]]))
    counts.add(rows, torch.tensor([[1, 5, 6, 7]]), chosen, chosen)
    counts.add(rows, chosen, chosen, chosen)
    assert counts.total().tolist() == [[2, 0, 0], [3, 1, 0]]


def test_acceptance_length_is_one_and_the_drafts_that_survive() -> None:
    found = Acceptance.of(torch.tensor([[8, 3, 0], [16, 4, 0]]))
    assert found.rates == (0.5, 0.75, 0.0) and found.drafts == (16, 4, 0)
    assert [found.length(count) for count in (0, 1, 2, 3)] == [1, 1.5, 1.875, 1.875]
    assert found.metrics()["length_1"] == 1.5 and found.metrics()["accepted_2"] == 0.75


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kind", "medusa"),
        ("epochs", 0),
        ("learning_rate", float("inf")),
        ("warmup", 1.5),
        ("unroll", 0),
        ("draft_vocab", 1),
        ("layers", (3, 1)),
        ("layers", "1"),
        ("held_out", 0.9),
        ("minutes", -1),
        ("states", 1),
        ("layout", "medusa"),
    ],
)
def test_wrong_options_are_named_before_training(name: str, value: Any) -> None:
    with raises(InvalidOption, where="train_head", name=name):
        TrainOptions(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("share", 1.5), ("batch_tokens", 4), ("unroll", 0), ("learning_rate", -1)])
def test_wrong_options_of_online_training_are_named(name: str, value: Any) -> None:
    with raises(InvalidOption, where="OnlineTraining", name=name):
        OnlineTraining(**{name: value})


def test_the_docstring_of_train_head_has_all_parameters() -> None:
    assert {"target", "data", "output", "tokenizer", "progress"} <= paragraphs(train_head).keys()


def test_a_target_on_another_gpu_than_the_trainers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingArguments, "_setup_devices", torch.device("cuda", 0))
    monkeypatch.setattr(TrainingArguments, "n_gpu", 1)
    given = TrainOptions(precision="float32")
    loop.arguments(tmp_path, given, torch.device("cuda", 0))
    with raises(InvalidOption, name="target", value="cuda:1", reason=re.compile("CUDA_VISIBLE_DEVICES=1")):
        loop.arguments(tmp_path, given, torch.device("cuda", 1))
