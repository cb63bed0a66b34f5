"""Heads of kinds other than EAGLE-3 are trained, and draft in their mode what the target would write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Tree
from speccompile.errors import InvalidOption
from speccompile.heads import load_dflash
from speccompile.training import TrainedHead, TrainOptions, train_head
from speccompile.training.kinds import kind_of
from support.errors import raises
from support.families import family
from support.training_data import QUICK_BY_KIND, greedy_texts, learnable, quick_kind, write_texts


@pytest.fixture(scope="module", params=QUICK_BY_KIND)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str) -> LlamaForCausalLM:
    # A block drafter reads the newest token by its attention alone: with one KV head through half of its width.
    return learnable(kv_heads=2 if kind == "block" else 1)


@pytest.fixture(scope="module")
def trained(kind: str, model: LlamaForCausalLM, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedHead:
    return train_head(model, texts, tmp_path_factory.mktemp("head"), quick_kind(kind), progress=False)


def test_acceptance_rises_to_near_all_drafts(trained: TrainedHead) -> None:
    first = trained.curve[min(trained.curve)]
    assert trained.finished and trained.acceptance.length(3) > 3.6 > first.length(3)
    assert len(trained.acceptance.rates) == 7


SIZES: dict[str, Any] = {"tiers": (0, 3), "policy": "fixed:3", "max_len": 39, "backend": "eager", "max_batch": 1}


def test_auto_finds_the_mode_which_accepts_as_many_writes_the_same_text_and_warns_of_nothing(
    model: LlamaForCausalLM, trained: TrainedHead, recwarn: pytest.WarningsRecorder
) -> None:
    # Random tokens alone are rare in texts.
    texts = greedy_texts(model, 6, new=6 + 29, seed=9)
    recwarn.clear()
    with speccompile.wrap(model, "auto", draft=trained.folder, **SIZES) as spec:
        assert not recwarn.list and spec.mode.name == trained.mode
        made = [spec.generate(text[None, :9], max_new_tokens=29)[0] for text in texts]
        measured = spec.stats.acceptance_length
    assert torch.equal(torch.stack(made), texts)
    assert measured == pytest.approx(trained.acceptance.length(3), abs=0.4) and measured > 3.3


def test_the_target_is_left_as_it_was(model: LlamaForCausalLM, trained: TrainedHead) -> None:
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_a_head_is_trained_further(
    kind: str, model: LlamaForCausalLM, texts: Path, trained: TrainedHead, tmp_path: Path
) -> None:
    options = quick_kind(kind, epochs=1, start=str(trained.folder), learning_rate=1e-5)
    found = train_head(model, texts, tmp_path, options, progress=False)
    assert found.acceptance.length(3) == pytest.approx(trained.acceptance.length(3), abs=0.1)


def test_a_wrap_of_another_target_warns(model: LlamaForCausalLM, trained: TrainedHead) -> None:
    """Sizes are equal: nothing else shows it. A wrap of the same target, above, does not."""
    other = learnable(seed=1, kv_heads=model.config.num_key_value_heads)
    with pytest.warns(UserWarning, match=r"was trained for the target LlamaForCausalLM v2:\w+, and this is Llama"):
        speccompile.wrap(other, trained.mode, draft=trained.folder, **SIZES).close()


def test_a_block_with_all_that_dspark_adds(tmp_path: Path) -> None:
    """It drafts in its mode what it was judged to draft, also as a tree, and is trained further from its files."""
    model = learnable(kv_heads=2)
    texts = write_texts(tmp_path / "texts", model, greedy_texts(model, 200))
    added: dict[str, Any] = {"markov_rank": 8, "draft_vocab": 24, "sample_from_anchor": True}
    losses: dict[str, Any] = {"weights": "pace", "variation": 0.2}
    options = quick_kind("block", **added, **losses)
    found = train_head(model, texts, tmp_path / "head", options, progress=False)
    assert found.acceptance.length(3) > 2.6 and len(found.acceptance.rates) == 8
    tree = Tree.dynamic(nodes=7, depth=3, branches=2)
    with speccompile.wrap(model, "dflash", draft=found.folder, **SIZES | {"tiers": (0, 3, tree)}) as spec:
        for shape in (3, tree):
            spec.set_tier(shape)
            made = greedy_texts(model, 6, new=6 + 29, seed=9)
            assert all(torch.equal(spec.generate(text[None, :9], max_new_tokens=29)[0], text) for text in made)
        assert spec.stats.acceptance_length > 2.3
    further = quick_kind("block", epochs=1, start=str(found.folder), learning_rate=1e-5, **losses)
    again = train_head(model, texts, tmp_path / "further", further, progress=False)
    assert again.acceptance.length(3) == pytest.approx(found.acceptance.length(3), abs=0.1)
    for name, value in (("markov_rank", 8), ("block_size", 4), ("head_layers", 1)):
        options = quick_kind("block", start=str(found.folder), **{name: value})
        with raises(InvalidOption, name=name):
            train_head(model, texts, tmp_path / "other", options, progress=False)


def test_a_block_for_a_target_that_scales_its_embedding(tmp_path: Path) -> None:
    """speculators' layout has no scale: a head that is saved in it has none."""
    target = family("gemma2")
    kind = kind_of(target, TrainOptions(kind="block", markov_rank=4, layers=(0,)))
    head = kind.build(torch.ones(target.config.vocab_size, dtype=torch.int64), ())
    kind.save(head, tmp_path)
    loaded = load_dflash(tmp_path, target)
    assert loaded.config.embedding_scale == 1.0 and torch.equal(loaded.fc.weight, head.fc.weight.half().float())


def test_a_training_of_blocks_that_was_stopped_ends_with_the_same_weights(tmp_path: Path) -> None:
    """Where blocks start is random."""
    model = learnable()
    texts = write_texts(tmp_path / "texts", model, greedy_texts(model, 40))
    for folder, minutes in [("whole", (None,)), ("parts", (0, 0, None))]:
        for value in minutes:
            options = quick_kind("block", epochs=2, eval_every=2, minutes=value)
            found = train_head(model, texts, tmp_path / folder, options, progress=False)
    last = f"checkpoints/checkpoint-{found.steps}/model.safetensors"
    one, other = (load_file(tmp_path / folder / last) for folder in ("whole", "parts"))
    assert found.finished and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("of_kind", "name", "value"),
    [
        ("mtp", "layers", (0, 1)),
        ("mtp", "draft_vocab", 24),
        ("mtp", "layout", "specforge"),
        ("block", "unroll", 2),
        ("eagle3", "blocks", 3),
        ("eagle3", "markov_rank", 3),
        ("mtp", "weights", "pace"),
    ],
)
def test_an_option_of_another_kind_is_refused(of_kind: str, name: str, value: Any) -> None:
    with raises(InvalidOption, where="train_head", name=name):
        TrainOptions(kind=of_kind, **{name: value})


def test_a_decay_that_has_no_effect_is_refused() -> None:
    with raises(InvalidOption, where="train_head", name="decay"):
        TrainOptions(kind="block", weights="pace", decay=0.5)
