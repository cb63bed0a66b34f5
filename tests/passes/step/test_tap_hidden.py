"""Hidden states tapped by a pass are those that transformers hands out."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch
from torch import fx, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from speccompile.errors import AnchorError, NothingMatched
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.pipeline import Pipeline
from speccompile.passes.step.tap_hidden import LowerTaps, MarkTaps, Tap
from speccompile.passes.target.choose_attention import ChooseAttention
from speccompile.passes.target.choose_linear import KeepLinears
from speccompile.passes.target.outline import OutlineLayers
from support.errors import raises
from support.tiny import known_capture, tiny_llama

LAYERS, TOKENS = 6, 9


def llama() -> PreTrainedModel:
    model = tiny_llama(layers=LAYERS)
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
    return model


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=LAYERS, n_embd=48, n_head=4, vocab_size=128, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.transformer.ln_f.parameters():
            parameter.uniform_(0.5, 1.5)
    return model


MODELS = {"llama": (llama, "model.layers", "model.norm"), "gpt2": (gpt2, "transformer.h", "transformer.ln_f")}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, str, str]:
    make, layers, norm = MODELS[request.param]
    return make(), layers, norm


@pytest.fixture(scope="module")
def graph(model: tuple[PreTrainedModel, str, str]) -> StepGraph:
    """As it was captured: passes run over copies of it."""
    graph = known_capture(model[0]).graph
    # There is no step around it.
    graph.facts.add("committed")
    return graph


def tapped(graph: StepGraph, taps: Sequence[Tap], *, outlined: bool) -> StepGraph:
    passes = [MarkTaps(tuple(taps)), LowerTaps()]
    before = [ChooseAttention(), KeepLinears(), OutlineLayers()] if outlined else []
    for part, goals in ((before, {"outlined"} if outlined else set()), (passes, {"tapped"})):
        if part:
            graph, _ = Pipeline(tuple(part), frozenset(goals), "taps").run(graph)
    return graph


def run(graph: StepGraph, tokens: torch.Tensor) -> torch.Tensor:
    """``tapped`` of one row of ``tokens`` ``[T]``."""
    graph.set_outputs(graph.values["tapped"])
    inputs = {
        "input_ids": tokens[None],
        "position_ids": torch.arange(len(tokens))[None],
        "row_slots": torch.zeros(1, dtype=torch.int64),
    }
    values = []
    for node in graph.placeholders:
        port = graph.ports[node.name]
        value = inputs.get(node.name, port.value)
        values.append(torch.zeros(port.shape, dtype=port.dtype) if value is None else value)
    root = nn.Module()
    for name, body in graph.bodies.items():
        root.add_module(name, body.module)
    with torch.no_grad():
        (result,) = fx.Interpreter(fx.GraphModule(root, graph.graph)).run(*values)
    return result[0]


@pytest.mark.parametrize("outlined", [False, True])
def test_hidden_states_are_the_model_s_own(
    model: tuple[PreTrainedModel, str, str], graph: StepGraph, outlined: bool
) -> None:
    target, layers, norm_path = model
    tokens = torch.randint(128, (TOKENS,), generator=torch.Generator().manual_seed(0))
    norm = target.get_submodule(norm_path)
    with torch.no_grad():
        states = target(tokens[None], output_hidden_states=True).hidden_states
        # transformers' last one is after the norm already.
        last: list[torch.Tensor] = []
        handle = target.get_submodule(layers)[-1].register_forward_hook(
            lambda _module, _inputs, output: last.append(output[0] if isinstance(output, tuple) else output)
        )
        target(tokens[None])
        handle.remove()
        wanted = {
            Tap(1): states[2],
            Tap(f"{layers}.2"): states[3],
            Tap(-1): last[0],
            Tap(LAYERS - 1, post_norm=True): states[-1],
            Tap(norm_path): states[-1],
            Tap(3, post_norm=True): norm(states[4]),
            Tap(f"{layers}.0", post_norm=True): norm(states[1]),
            Tap(0, before=True): states[0],
            Tap(-1, before=True): states[LAYERS - 1],
        }
    chunks = run(tapped(graph, list(wanted), outlined=outlined), tokens).chunk(len(wanted), dim=-1)
    for (tap, state), found in zip(wanted.items(), chunks, strict=True):
        torch.testing.assert_close(found, state[0], rtol=0, atol=1e-5, msg=lambda message, tap=tap: f"{tap}: {message}")


def test_the_usual_three(model: tuple[PreTrainedModel, str, str], graph: StepGraph) -> None:
    """EAGLE-3's: what its authors take from ``hidden_states[2]``, ``[L // 2]`` and ``[L - 3]``."""
    from speccompile.heads import default_taps

    target, _, _ = model
    tokens = torch.randint(128, (TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        states = target(tokens[None], output_hidden_states=True).hidden_states
    graph = tapped(graph, [Tap(layer) for layer in default_taps(LAYERS)], outlined=True)
    wanted = torch.cat([states[2], states[LAYERS // 2], states[LAYERS - 3]], dim=-1)
    torch.testing.assert_close(run(graph, tokens), wanted[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_a_place_that_is_not_there(graph: StepGraph) -> None:
    for index in (LAYERS, -LAYERS - 1):
        with raises(AnchorError, anchor=f"decoder layer {index}"):
            tapped(graph, [Tap(index)], outlined=False)
    for path in ("model.layers.9", "model.layers.1.mlp", "model.layer", "lm_head"):
        with raises(AnchorError, anchor=repr(path)):
            tapped(graph, [Tap(path)], outlined=False)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_before_is_of_a_layer_alone(graph: StepGraph) -> None:
    for tap in (Tap("model.norm", before=True), Tap(1, post_norm=True, before=True)):
        with raises(AnchorError, reason=re.compile("before= needs at= of a decoder layer")):
            tapped(graph, [tap], outlined=False)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_a_tap_pass_without_taps_matches_nothing(graph: StepGraph) -> None:
    with pytest.raises(NothingMatched):
        tapped(graph, [], outlined=False)
