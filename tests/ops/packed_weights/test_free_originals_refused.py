"""Where one copy of the weights cannot be had: the wrap says so, and the model has its weights back."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from speccompile.errors import CannotSave, CaptureMismatch, FreeOriginalsUnavailable, InvalidOption
from speccompile.lowering.kernels import Kernels
from speccompile.ops.cpu.forms.same import Same
from support.errors import raises
from support.packed_models import PROMPTS, alive, greedy, watched, with_freed_originals, with_neighbours
from support.tiny import tiny_llama


def test_a_flag_is_wanted() -> None:
    with raises(InvalidOption, name="free_originals", value="yes"):
        with_freed_originals(tiny_llama(), free_originals="yes")


def test_without_packed_weights_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "torch's own: no C++ compiler was found"
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: Kernels(False, reason))
    with raises(FreeOriginalsUnavailable, reason=re.compile(r"no C\+\+ compiler was found")):
        with_freed_originals(tiny_llama())


def state(model: PreTrainedModel) -> dict[str, tuple[torch.Tensor, int]]:
    return {
        name: (parameter.detach().clone(), id(parameter))
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


@pytest.fixture
def untouched() -> Iterator[PreTrainedModel]:
    """A model that is as it was when the test is through."""
    model = tiny_llama(tie_word_embeddings=True)
    before, kinds = state(model), [type(module) for module in model.modules()]
    keys = list(model.state_dict())
    yield model
    after = state(model)
    assert before.keys() == after.keys() and kinds == [type(module) for module in model.modules()]
    assert all(torch.equal(before[name][0], after[name][0]) and before[name][1] == after[name][1] for name in before)
    assert model.lm_head.weight is model.model.embed_tokens.weight and list(model.state_dict()) == keys
    with_freed_originals(model, free_originals=False).generate(PROMPTS, max_new_tokens=4)


any_form = pytest.mark.parametrize("form", ["same", {"*": "int4", "mlp": "same"}], ids=str)


@any_form
def test_a_failed_wrap_gives_the_weights_back(
    untouched: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    with monkeypatch.context() as patch:

        def refused(*_: Any) -> float:
            raise CaptureMismatch(model="it", difference=1.0, allowed=0.1, where="here")

        patch.setattr("speccompile.compiler.attempts.check_capture", refused)
        with pytest.raises(CaptureMismatch):
            with_freed_originals(untouched, weights=form)


def test_an_interrupted_wrap_gives_the_weights_back(
    untouched: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, calls = Same.pack, []

    def interrupted(form: Same, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return pack(form, weight)

    with monkeypatch.context() as patch:
        patch.setattr(Same, "pack", interrupted)
        with pytest.raises(KeyboardInterrupt):
            with_freed_originals(untouched)


@any_form
def test_a_failure_behind_the_build_gives_the_weights_back(
    untouched: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("speccompile.runtime.engine.Engine.prepare", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            with_freed_originals(untouched, sampling=True, weights=form)


def test_a_second_attempt_starts_from_plain_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first route is refused by the check; the second one is captured, and frees weights again."""
    from speccompile.compiler import attempts

    # Other tests are to find no capture by that route.
    monkeypatch.setattr("speccompile.utils.storage.cache_dir", lambda: tmp_path)
    check, calls = attempts.check_capture, []

    def once(*arguments: Any) -> float:
        calls.append(1)
        if len(calls) < 3:
            raise CaptureMismatch(model="it", difference=1.0, allowed=0.1, where="here")
        return check(*arguments)

    model = tiny_llama()
    wanted = greedy(model, new=20)
    with_freed_originals(tiny_llama(), free_originals=False, tiers=(0,))
    monkeypatch.setattr(attempts, "check_capture", once)
    refs = watched(model)
    # A stored capture, a new one, and one by the model's own attention.
    spec = with_freed_originals(model, tiers=(0,))
    assert spec.route == "eager" and len(calls) == 3
    assert torch.equal(spec.generate(PROMPTS, max_new_tokens=20), wanted)
    gc.collect()
    assert len(refs) - len(alive(refs)) == 15


def test_where_bits_are_not_kept_one_copy_is() -> None:
    model = with_neighbours()
    refs = watched(model)
    spec = with_freed_originals(model)
    gc.collect()
    assert "deterministic  no" in spec.explain() and len(refs) - len(alive(refs)) == 15
    spec.generate(PROMPTS, max_new_tokens=4)


def test_deterministic_that_needs_torchs_own_linears_is_refused() -> None:
    model = with_neighbours()
    before = state(model)
    with raises(FreeOriginalsUnavailable, reason=re.compile("deterministic=True needs torch's own linears")):
        with_freed_originals(model, deterministic=True)
    assert all(torch.equal(parameter, before[name][0]) for name, parameter in model.named_parameters())


def test_a_model_with_freed_originals_cannot_be_saved_in_a_package(tmp_path: Path) -> None:
    with raises(CannotSave, reason=re.compile("which are gone")):
        with_freed_originals(tiny_llama()).save(tmp_path / "package")
