"""Captures a mode's own network, runs the passes over it, and checks the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import fx

from speccompile.adapters.buffers import slot_state
from speccompile.compiler.config import BuildConfig
from speccompile.compiler.pipelines import model_pipeline
from speccompile.errors import InvalidTiers
from speccompile.graph.arena import Arena
from speccompile.graph.splicing import PREFIX, prefix_bodies, prefix_names
from speccompile.graph.stage import Stage, Stages
from speccompile.graph.state import Layout
from speccompile.graph.step_graph import StepGraph
from speccompile.graph_capture.rope_positions import reads_parts
from speccompile.lowering.backends import Eager, lower
from speccompile.modes.network.draft_network import DraftNetwork, prefixed
from speccompile.modes.network.draft_windows import add_wider_bodies, has_windows
from speccompile.ops.cpu.packing import WeightPacks
from speccompile.passes.target.choose_experts import has_experts
from speccompile.utils.progress import task
from speccompile.utils.storage import Storage
from speccompile.utils.weight_forms import WeightForms


@dataclass(frozen=True)
class Drafter:
    """A network that drafts, whose graph passes can copy into steps.

    Args:
        captured: its captured graph, with its own names of tensors.
        stages: its stages, with the names of the arena.
        packs: of its weights.
        from_store: whether its capture was read from a storage.
    """

    network: DraftNetwork
    captured: StepGraph
    stages: Stages
    packs: WeightPacks
    from_store: bool

    @property
    def graph(self) -> StepGraph:
        """The graph that passes copy."""
        return self.stages.last.graph

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The network's weights, by path."""
        return self.captured.weights

    def check(self, config: BuildConfig, arena: Arena) -> float:
        """The largest difference between the lowered graph and the network's own forward.

        Raises:
            CaptureMismatch, LoweringError.
        """
        lowered = lower(config.backend, self.graph, "the drafter")

        def reference(graph: StepGraph) -> Callable[..., object]:
            return Eager("reference").lower(graph, "the drafter")

        with task("check the captured drafter"):
            return self.network.check(self.graph, arena, lowered, reference, self.packs)


def make_drafter(network: DraftNetwork, config: BuildConfig, target: Layout, storage: Storage | None) -> Drafter:
    """Capture ``network`` for an arena like ``target``, and run the passes of the target's capture over it.

    Args:
        storage: of captures; None does not read a stored capture.

    Raises:
        CaptureError, PassError.
        InvalidTiers: a tier is a tree, and the network's attention does not support trees.
    """
    # One forward drafts a tree without reading its nodes.
    reads_nodes = bool(config.trees) and not config.mode.one_forward
    if reads_nodes and network.route != "attention":
        raise InvalidTiers(tiers=config.tiers, reason="there are trees, and the drafter runs its own attention")
    layout = network.layout(target)
    with task("capture the drafter"):
        captured, from_store = network.capture(layout, storage)
    named = captured.copy()
    names = prefixed(layout)
    if (buffers := config.head_adapters) is not None:
        shared = [*slot_state(buffers.count), *buffers.state()]
        names = replace(names, tensors={**names.tensors, **{spec.name: target.tensors[spec.name] for spec in shared}})
    prefix_names(named, PREFIX, names)
    _hold_target_ids(named)
    weights = WeightForms(network.weights)
    packs = WeightPacks(weights, quantized=config.quantized)
    # One shape of all tiers keeps the target's bits. The text does not depend on a drafter's bits.
    own = replace(
        config,
        tiers=config.tiers if reads_nodes else config.chains,
        route=network.route,
        experts=has_experts(named),
        rope_parts=reads_parts(named),
        inputs=None,
        weights=weights,
        deterministic=None,
        network=None,
        passes=(),
        adapters=config.head_adapters,
        head_adapters=None,
    )
    first = Stage("capture", "the captured drafter", named.copy(), 0.0)
    outlined, stages = model_pipeline(own, packs).run(named, first)
    prefix_bodies(outlined, PREFIX)
    if network.windows_stay:
        if reads_nodes and has_windows(outlined):
            reason = "sliding windows of the drafter grow with each token of a chain"
            raise InvalidTiers(tiers=config.tiers, reason=f"there are trees, and {reason}")
        add_wider_bodies(outlined, config.max_draft_len)
    return Drafter(network, captured, _ending_in(stages, outlined), packs, from_store)


def _hold_target_ids(graph: StepGraph) -> None:
    """Compute the target's ids of a head's own vocabulary once, instead of in every step."""
    if (computed := graph.values.get("target_ids")) is None:
        return
    values: dict[fx.Node, torch.Tensor] = {}

    def value_of(node: fx.Node) -> torch.Tensor | None:
        if node.op == "placeholder":
            return graph.ports[node.name].value
        if node not in values:
            args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
            values[node] = cast(Callable[..., torch.Tensor], node.target)(*args, **kwargs)
        return values[node]

    ids = value_of(computed)
    assert ids is not None
    # A placeholder keeps the name of its port.
    graph.values["target_ids"] = held = graph.constant(f"{PREFIX}target_ids", ids)
    computed.replace_all_uses_with(held)
    graph.remove_dead_code()


def _ending_in(stages: Stages, graph: StepGraph) -> Stages:
    last = stages.last
    return Stages([*(stages[name] for name in stages if name != last.name), replace(last, graph=graph)])


def attach(drafter: Drafter, target: StepGraph) -> None:
    """Let the passes over ``target`` copy from the drafter's graph and call its bodies."""
    target.drafter = drafter.graph
    target.bodies |= drafter.graph.bodies
