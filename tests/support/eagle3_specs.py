"""Speculators with EAGLE-3 heads, and what their steps draft, seen from outside."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from speccompile import Speculator, wrap
from speccompile.graph.step_graph import StepGraph
from speccompile.heads import Eagle3Head
from support.eagle3_reference import PlainEagle3
from support.engines import read_all

TAPS = (0, 1, 2)
MAX_LEN = 128


def eagle3(model: PreTrainedModel, head: Any, mode: str = "eagle3_one_model", **options: Any) -> Speculator:
    sizes: dict[str, Any] = {"tiers": (0, 1, 3), "max_batch": 4, "max_len": MAX_LEN, "backend": "eager"}
    options = sizes | options
    return wrap(model, mode, draft=head, **({"policy": f"fixed:{max(options['tiers'])}"} | options))


def plain_of(head: Eagle3Head) -> PlainEagle3:
    """The head written down once more, of the same weights."""
    config = head.config
    weights = {key: value.detach() for key, value in head.state_dict().items()}
    if config.num_hidden_layers == 1:
        weights = {key.replace("layers.0.", "midlayer."): value for key, value in weights.items()}
    return PlainEagle3(
        weights,
        config.num_attention_heads,
        config.num_key_value_heads,
        eps=config.rms_norm_eps,
        theta=config.rope["rope_theta"],
        layers=config.num_hidden_layers,
        norm_before_residual=config.norm_before_residual,
        norm_output=config.norm_output,
    )


def states_of(model: PreTrainedModel, text: list[int], taps: tuple[int, ...] = TAPS) -> list[torch.Tensor]:
    """The tapped hidden states ``[n, M]`` of all of a text but its last token."""
    with torch.no_grad():
        states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    return [states[layer + 1][0] for layer in taps]


def drafted(spec: Speculator, slot: int, draft_len: int) -> tuple[list[int], torch.Tensor]:
    """What a greedy step of that tier would draft for a slot now: tokens, and logits ``[K, V]``, or
    ``[K, Vd]`` where the head has its own vocabulary.

    Runs the step's ops before the target, which change nothing but KV after the text.
    """
    read_all(spec, slot)
    drafts, logits = run_until(spec, slot, spec.engine.tiers[draft_len, 1, "greedy"].graph, "drafts")
    return drafts[0].tolist(), torch.stack(logits)


def run_until(spec: Speculator, slot: int, graph: StepGraph, name: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The named value of a step of one row, and the scores ``[V]`` of each choice before it."""
    arena = spec.arena
    before = arena["slots"].clone()
    arena["slots"].fill_(arena.layout.dummy_slot)
    arena["slots"][0] = slot
    values: dict[torch.fx.Node, Any] = {}
    logits: list[torch.Tensor] = []
    interpreter = torch.fx.Interpreter(torch.nn.Module(), graph=graph.graph)
    with torch.no_grad():
        for node in graph.graph.nodes:
            args = torch.fx.map_arg(node.args, lambda item: values[item])
            kwargs = torch.fx.map_arg(node.kwargs, lambda item: values[item])
            if node.op == "placeholder":
                value = graph.ports[node.name].value
                values[node] = arena[node.name] if value is None else value
            elif node.op == "call_module":
                values[node] = graph.bodies[node.target].module(*args)
            else:
                values[node] = getattr(interpreter, node.op)(node.target, args, kwargs)
            if node.target is torch.ops.speccompile.choose.default:
                logits += args[0][0]
            if node is graph.values[name]:
                break
    arena["slots"].copy_(before)
    return values[graph.values[name]], logits


def drafted_in_front(spec: Speculator, slot: int, draft_len: int) -> list[int]:
    """The same of a split drafter: its executable is run, which leaves drafts for the step that follows."""
    arena = spec.arena
    read_all(spec, slot)
    before = arena["slots"].clone()
    arena["slots"].fill_(arena.layout.dummy_slot)
    arena["slots"][0] = slot
    front = spec.engine.tiers[draft_len, 1, "greedy"].drafter
    assert front is not None
    front.run()
    arena["slots"].copy_(before)
    tokens: list[int] = arena["stored_drafts"][slot, :draft_len].tolist()
    return tokens
