"""The tables of ``speccompile inspect``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from rich.table import Table

from speccompile.graph.stage import Stage, Stages
from speccompile.graph.state import Layout, StateTensor
from speccompile.graph.step_graph import StepGraph
from speccompile.lowering.kernel_list import KernelCall, KernelKind

_TEXT = ("tokens", "length", "prompt_length", "limit", "alive", "eos")
_SHOWN_CHANGES = 3


def stages_table(stages: Stages, title: str) -> Table:
    table = _table(title, "stage", "nodes", "seconds", "matched", "ops that came and went")
    previous: Stage | None = None
    for name, stage in stages.items():
        nodes = sum(stage.op_counts.values())
        change = "" if previous is None else _change(previous.op_counts, stage.op_counts)
        table.add_row(name, str(nodes), f"{stage.seconds:.2f}", stage.note, change)
        previous = stage
    return table


def _change(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    delta = {name: after.get(name, 0) - before.get(name, 0) for name in {**before, **after}}
    changed = sorted((item for item in delta.items() if item[1]), key=lambda item: (-abs(item[1]), item[0]))
    shown = [f"{count:+} {_op_name(name)}" for name, count in changed[:_SHOWN_CHANGES]]
    rest = len(changed) - len(shown)
    return ", ".join(shown) + (f", {rest} more" if rest else "")


_KINDS: dict[KernelKind, str] = {
    "triton": "ours, Triton",
    "c++": "ours, C++",
    "plain": "ours, of torch's ops",
    "inductor": "written by Inductor",
    "stock": "torch's own",
    "body": "",
}


def kernels_table(calls: Iterable[KernelCall], title: str, backend: str | None) -> Table:
    """What the step calls, and what each outlined body calls in turn."""
    body = {None: "body, not lowered", "eager": "body, run op by op"}.get(backend, f"body, compiled by {backend}")
    table = _table(title, "called from", "calls", "kernel", "whose")
    caller = None
    for call in calls:
        if caller not in (None, call.caller):
            table.add_section()
        caller = call.caller
        table.add_row(call.caller, str(call.calls), call.name, body if call.kind == "body" else _KINDS[call.kind])
    return table


def _op_name(name: str) -> str:
    # Arithmetic on sizes is a Python builtin, whose text rich would take for markup.
    return name.removeprefix("<built-in function ").removesuffix(">").removesuffix(".default")


def tiers_table(tiers: Mapping[tuple[int, int], Stages], prefill: Mapping[int, Stages], backend: str | None) -> Table:
    table = _table("Tiers and prefill", "", "rows x width", "ops", "bodies", "executable")
    rows = [(f"tier K={draft_len}", stages) for (draft_len, _), stages in tiers.items()]
    rows += [(f"prefill T={width}", stages) for width, stages in prefill.items()]
    for name, stages in rows:
        graph = stages.last.graph
        counts = graph.op_counts()
        bodies = ", ".join(f"{count} x {body}" for body, count in counts.items() if body in graph.bodies)
        size = f"{graph.sizes['B']} x {graph.sizes['T']}"
        table.add_row(name, size, str(sum(counts.values())), bodies, backend or "not lowered")
    return table


def buffers_table(layout: Layout, drafter_state: Iterable[str]) -> Table:
    """The arena by group, KV of all layers on a line for each shape."""
    table = _table("Buffers (arena)", "group", "tensors", "shape", "type", "bytes")
    groups: dict[str, list[StateTensor]] = {"KV": [], "text": [], "drafter": [], "io": []}
    drafter = set(drafter_state)
    for tensor in layout.tensors.values():
        groups[_group(tensor.name, drafter)].append(tensor)
    for group, tensors in groups.items():
        for line in _alike(tensors, group == "KV"):
            first, last = line[0], line[-1]
            name = first.name if len(line) == 1 else f"{first.name} .. {last.name} ({len(line)})"
            size = sum(tensor.nbytes for tensor in line)
            table.add_row(group, name, str(list(first.shape)), _type(first), f"{size:,}")
        if len(tensors) > 1:
            total = sum(tensor.nbytes for tensor in tensors)
            table.add_row(group, f"all {len(tensors)}", "", "", f"{total:,}", style="bold")
        table.add_section()
    everything = sum(tensor.nbytes for tensor in layout.tensors.values())
    table.add_row("arena", f"all {len(layout.tensors)}", "", "", f"{everything:,}", style="bold")
    return table


def _group(name: str, drafter: set[str]) -> str:
    if name in drafter:
        return "drafter"
    if name.startswith(("k_", "v_")):
        return "KV"
    return "text" if name in _TEXT else "io"


def _alike(tensors: list[StateTensor], merge: bool) -> Iterable[list[StateTensor]]:
    """Tensors that share a line: of the KV, all keys of one shape, and all values."""
    lines: dict[object, list[StateTensor]] = {}
    for tensor in tensors:
        key = (tensor.name[0], tensor.shape, tensor.dtype) if merge else tensor.name
        lines.setdefault(key, []).append(tensor)
    return lines.values()


def _type(tensor: StateTensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def weights_line(graph: StepGraph) -> str:
    weights = [port for port in graph.ports.values() if port.value is not None]
    packed = _nbytes(port.value for port in weights if port.own)
    shared = _nbytes(port.value for port in weights if not port.own)
    line = f"Weights: {len(weights)} tensors, {_size(shared)} shared with the model"
    if packed:
        line += (
            f", {_size(packed)} packed: a second copy, beside the model's own weights "
            "(wrap(consume=True) keeps one copy of weights in the model's own type)"
        )
    return line


def _nbytes(tensors: Iterable[torch.Tensor | None]) -> int:
    # Tied weights have one port each, and lie in memory once.
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor is not None}.values())


def _size(nbytes: int) -> str:
    return f"{nbytes:,} bytes ({nbytes / 2**20:.1f} MiB)"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        right = name in ("nodes", "seconds", "calls", "ops", "bytes")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    return table
