"""Recurrences of transformers' files are captured as ops, in the thread that captures."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest
import torch
import transformers.models.lfm2.modeling_lfm2 as lfm2
from transformers import PreTrainedModel

import speccompile
from speccompile.errors import CaptureMismatch
from speccompile.graph_capture import recurrence
from speccompile.graph_capture.attention import Running, running
from speccompile.graph_capture.cache import RecordingCache
from speccompile.graph_capture.masks import MaskLog, UnsupportedByRoute
from speccompile.graph_capture.model_info import inspect_model
from speccompile.graph_capture.observe import observe
from speccompile.graph_capture.recurrence import CAPTURED, recurrences_captured
from speccompile.graph_capture.store import _observation, _read_observation
from support.errors import raises
from support.families import model_of
from support.tiny import captured

NAME = "causal_conv1d_fn"
OWN = getattr(lfm2, NAME)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return model_of("lfm2")


def convolved(**options: Any) -> torch.Tensor:
    inputs = torch.arange(12.0).view(1, 2, 6)
    result: torch.Tensor = getattr(lfm2, NAME)(inputs, torch.ones(2, 3), **options)
    return result


def under_capture() -> Running:
    return Running(RecordingCache(), torch.arange(6)[None], MaskLog())


def test_a_file_has_its_own_functions_back(model: PreTrainedModel) -> None:
    with recurrences_captured(model):
        assert getattr(lfm2, NAME) is not OWN
    assert getattr(lfm2, NAME) is OWN
    with pytest.raises(ZeroDivisionError), recurrences_captured(model):
        1 / 0  # noqa: B018
    assert getattr(lfm2, NAME) is OWN


def test_other_threads_run_transformers_own(model: PreTrainedModel) -> None:
    expected, found = convolved(), []
    with recurrences_captured(model), running(under_capture()):
        thread = threading.Thread(target=lambda: found.append(convolved()))
        thread.start()
        thread.join()
        # This one captures, and its convolution reads what no layer has put into the cache.
        with pytest.raises(UnsupportedByRoute, match="convolves other inputs"):
            convolved()
    assert torch.equal(found[0], expected)


def test_packed_texts_are_refused(model: PreTrainedModel) -> None:
    with (
        recurrences_captured(model),
        running(under_capture()),
        pytest.raises(UnsupportedByRoute, match="packs several sequences into one row"),
    ):
        convolved(seq_idx=torch.zeros(1, 6))


@pytest.mark.parametrize("name", ["lfm2", "zamba"])
def test_what_was_observed_is_stored(name: str) -> None:
    model = model_of(name)
    observed = observe(model, inspect_model(model))
    assert observed.recurrent and _read_observation(json.loads(json.dumps(_observation(observed)))) == observed


def test_a_recurrence_that_is_captured_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = CAPTURED[NAME]

    def wrong(
        cache: Any, own: Any, hidden_states: torch.Tensor, weight: torch.Tensor, *rest: Any, **options: Any
    ) -> Any:
        return right(cache, own, hidden_states, weight.flip(1), *rest, **options)

    # Its own size: the store has no capture of it.
    model = model_of("lfm2", conv_L_cache=5)
    monkeypatch.setitem(recurrence.CAPTURED, NAME, wrong)
    with raises(CaptureMismatch, where=re.compile(r"first wrong is model\.layers\.0 \(Lfm2DecoderLayer\)")):
        speccompile.wrap(model, "none", tiers=(0,), max_batch=1, max_len=64, backend="eager")


def test_a_weight_times_transposed_places_is_captured_as_a_linear() -> None:
    """Mamba's time steps. The bits of a product of matrices would depend on the number of places."""
    graph = captured(model_of("mamba")).graph
    (weight,) = [node for node in graph.placeholders if node.name.endswith("layers_0_mixer_dt_proj_weight")]
    assert [user.target for user in weight.users] == [torch.ops.aten.linear.default]
    assert not any(node.target is torch.ops.aten.matmul.default for node in graph.graph.nodes)
