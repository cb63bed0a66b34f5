"""``rebuild`` follows the model as it is; ``close`` releases it."""

from __future__ import annotations

import gc
import re
import weakref

import pytest
from transformers import LlamaForCausalLM

from speccompile.errors import CannotSave, ModelChanged, ModelInTraining
from support.errors import raises
from support.tiny import greedy, tiny_llama
from support.watched_models import NEW, PROMPT, steer, text, wrapped


def test_rebuild_follows_the_model_as_it_is_now(model: LlamaForCausalLM) -> None:
    with wrapped(model) as spec:
        plain = text(spec)
        handle = model.model.layers[0].register_forward_hook(steer)
        try:
            with pytest.raises(ModelChanged):
                text(spec)
            spec.rebuild()
            steered = greedy(model, PROMPT, NEW)
            assert text(spec) == steered != plain
            assert spec.check([PROMPT], max_new_tokens=NEW)
            with raises(CannotSave, reason=re.compile(r"a forward hook of model\.layers\.0 \(steer\)")):
                spec.save("never.spec")
        finally:
            handle.remove()
        with raises(ModelChanged, what=re.compile(r"a forward hook of model\.layers\.0 was removed")):
            text(spec)
        spec.rebuild()
        assert text(spec) == plain


def test_a_rebuild_that_is_refused_leaves_the_speculator_as_it_was(model: LlamaForCausalLM) -> None:
    with wrapped(model) as spec:
        before = text(spec)
        model.train()
        try:
            with pytest.raises(ModelInTraining):
                spec.rebuild()
        finally:
            model.eval()
        assert text(spec) == before


def test_a_closed_speculator_keeps_no_model() -> None:
    model = tiny_llama()
    spec, kept = wrapped(model), weakref.ref(model)
    spec.close()
    del model
    gc.collect()
    assert kept() is None
