"""Costs of the parts of a step: regions and kernels, measured and by the bytes that they read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import get_args

from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.lowering.kernel_list import STEP, KernelCall
from speccompile.report.measure import StepTimes
from speccompile.report.program_data import BodyReport, Kernel, Node, Region
from speccompile.report.programs import Times
from speccompile.report.regions import is_linear, is_ours
from speccompile.report.run_data import RegionCost

#: Name of the kernels of a body that Inductor wrote, which are measured together.
TOGETHER = "all kernels that Inductor wrote"


def times_of(graph: StepGraph, steps: StepTimes, *, compiled: bool) -> Times:
    """Times of every call of a step and of the calls of its bodies. In compiled bodies only calls to kernels that are
    also separate when compiled are included.
    """
    calls = [node for node in graph.graph.nodes if node.op in ("call_function", "call_module")]
    # Timing of each call adds overhead. Scale the sum down to the time of the whole step.
    left = max(0.0, steps.fastest - steps.drafters)
    scale = (
        min(1.0, left / whole)
        if (whole := sum(ms for (name, _), ms in steps.of_calls.items() if name == STEP))
        else 1.0
    )
    of_nodes = {node.name: scale * steps.of_calls.get((STEP, index), 0.0) for index, node in enumerate(calls)}
    of_bodies = {}
    for name in dict.fromkeys(str(node.target) for node in calls if node.op == "call_module"):
        inner = [node for node in graph.bodies[name].module.graph.nodes if node.op == "call_function"]
        kept = {
            node.name: steps.in_bodies.get((name, index), 0.0)
            for index, node in enumerate(inner)
            if not compiled or _is_a_kernel(node)
        }
        whole = sum(of_nodes[node.name] for node in calls if node.target == name)
        # A call can be slower op by op than in the compiled body. Scale the sum down to the time of the body.
        share = min(1.0, whole / total) if (total := sum(kept.values())) else 1.0
        of_bodies[name] = {node: share * ms for node, ms in kept.items()}
    return Times(of_nodes, of_bodies)


def _is_a_kernel(node: fx.Node) -> bool:
    return is_ours(node) or is_linear(node)


def region_costs(
    nodes: Iterable[Node], bodies: Iterable[BodyReport], step: StepTimes | None, bandwidth: float | None
) -> tuple[RegionCost, ...]:
    """Costs by region of a step's nodes. Calls of bodies are split by the regions of their nodes. Regions without calls
    are left out.
    """
    ms: dict[Region, float] = defaultdict(float)
    nbytes: dict[Region, int] = defaultdict(int)
    inside = {body.name: body for body in bodies}
    calls: dict[str, list[Node]] = defaultdict(list)
    for node in nodes:
        if node.body in inside and node.region == "layers":
            calls[node.body].append(node)
        else:
            ms[node.region] += node.ms or 0.0
            nbytes[node.region] += node.nbytes
    for name, callers in calls.items():
        _take_apart(inside[name], callers, [node for node in nodes if node.body == name], ms, nbytes)
    if step is not None:
        if step.drafters:
            ms["draft"] += step.drafters
        # The rest is the time between the calls of the step.
        ms["other"] += max(0.0, step.fastest - sum(ms.values()))
    regions = [region for region in get_args(Region) if region in ms or region in nbytes]
    return tuple(
        RegionCost(region, None if step is None else ms[region], nbytes[region], floor_ms(nbytes[region], bandwidth))
        for region in regions
    )


def _take_apart(
    body: BodyReport, callers: list[Node], all_callers: list[Node], ms: dict[Region, float], nbytes: dict[Region, int]
) -> None:
    """Add the regions of a body's nodes, in proportion to the share of ``callers`` in all calls of the body."""
    whole = sum(node.ms or 0.0 for node in callers)
    everything = sum(node.ms or 0.0 for node in all_callers)
    share = whole / everything if everything else len(callers) / len(all_callers)
    inner = 0.0
    for node in body.nodes:
        # Only weights and KV count as bytes of a region, not the small tensors of elementwise calls.
        nbytes[node.region] += int(len(callers) / len(all_callers) * node.nbytes)
        if node.ms is not None:
            ms[node.region] += share * node.ms
            inner += share * node.ms
    if whole:
        ms["elementwise"] += max(0.0, whole - inner)


def floor_ms(nbytes: int, bandwidth: float | None) -> float | None:
    """Milliseconds to read ``nbytes`` at ``bandwidth``."""
    return None if bandwidth is None else 1e3 * nbytes / bandwidth


def kernel_rows(
    calls: Iterable[KernelCall], nodes: Iterable[Node], bodies: Iterable[BodyReport], bandwidth: float | None
) -> tuple[Kernel, ...]:
    """Kernels with the bytes and the times of their calls."""
    callers: dict[str, Iterable[Node]] = {STEP: list(nodes), **{body.name: body.nodes for body in bodies}}
    found = []
    for call in calls:
        same = [node for node in callers.get(call.caller, ()) if node.op in (call.name, call.name.partition(":")[0])]
        timed = [node.ms for node in same if node.ms is not None]
        nbytes = sum(node.nbytes for node in same)
        found.append(
            Kernel(
                call.caller,
                call.name,
                call.kind,
                call.calls,
                nbytes,
                sum(timed) if timed else None,
                floor_ms(nbytes, bandwidth) if nbytes else None,
            )
        )
    return tuple(found) + tuple(_written(found, {node.body: node for node in nodes if node.body}, bodies, nodes))


def _written(
    found: list[Kernel], called: Mapping[str, Node], bodies: Iterable[BodyReport], nodes: Iterable[Node]
) -> Iterable[Kernel]:
    """For each compiled body, the time of its calls outside of kernels that were measured one by one."""
    for body in bodies:
        count = sum(kernel.calls for kernel in found if (kernel.caller, kernel.kind) == (body.name, "inductor"))
        whole = sum(node.ms or 0.0 for node in nodes if node.body == body.name)
        if count and whole:
            rest = whole - sum(node.ms or 0.0 for node in body.nodes)
            yield Kernel(body.name, TOGETHER, "inductor", count, 0, rest, None)
