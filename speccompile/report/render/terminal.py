"""A report as text for a terminal of 80 columns: a shorter form of the page. Names stay on one line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from speccompile.lowering.kernel_list import KernelKind
from speccompile.report.data import Report, TierReport
from speccompile.report.memory_data import Buffer
from speccompile.report.program_data import Kernel, Program, StageReport
from speccompile.report.verdict import NAMES

WIDTH = 80
_SHOWN_CHANGES = 2
_KINDS: dict[KernelKind, str] = {
    "triton": "ours, Triton",
    "c++": "ours, C++",
    "plain": "ours, of torch's ops",
    "inductor": "Inductor's",
    "stock": "torch's own",
    "body": "",
}


def show(report: Report, draft_len: int, console: Console | None = None) -> None:
    """Print the report, with the passes and kernels of the tier ``draft_len``."""
    console = Console(width=WIDTH, highlight=False) if console is None else console
    tier = next(tier for tier in report.tiers if tier.draft_len == draft_len)
    for part in _parts(report, tier):
        console.print(part)
        console.print()


def _parts(report: Report, tier: TierReport) -> Iterator[RenderableType]:
    subject = report.subject
    backend = subject.backend or "not lowered"
    yield Text(
        f"{subject.model}: {subject.layers} layers, {subject.dtype}, mode {subject.mode}, {backend}, "
        f"{subject.max_batch} slot{'s' * (subject.max_batch > 1)} of {subject.max_len} tokens"
    )
    yield Text("\n".join(report.verdict), style="bold")
    if report.fallbacks:
        lines = (f"{item.what}: {item.reason}. {item.advice}" for item in report.fallbacks)
        yield Text("\n".join(lines), style="red")
    yield _tiers(report.tiers)
    if tier.measured is not None:
        yield _regions(report.tiers)
        yield Text("\n".join(tier.explanation))
    for program in (report.model, *tier.drafters, tier.program):
        yield _passes(program)
    yield _kernels(tier, subject.backend)
    if tier.collectives:
        yield _collectives(tier)
    yield _executables(report)
    yield _buffers(report.buffers)
    yield _memory(report)
    if report.build is not None:
        parts = ", ".join(f"{part.name} {part.seconds:.1f} s" for part in report.build.parts)
        yield Text(f"Built in {report.build.seconds:.1f} s: {parts}")
    if subject.explanation:
        yield _explanation(subject.explanation)


def _table(title: str, *columns: str, numbers: Iterable[str] = (), wrap: Iterable[str] = ()) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", no_wrap=name not in wrap)
    return table


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def _tiers(tiers: Sequence[TierReport]) -> Table:
    names = ("rows x\nwidth", "ms", "memory\nneeds", "breaks\neven", "acceptance\nlength", "tokens/s")
    table = _table("Tiers", "tier", *names, numbers=names)
    for tier in tiers:
        decoded = tier.decoded
        table.add_row(
            tier.name,
            f"{tier.rows} x {tier.width}",
            _ms(None if tier.measured is None else tier.measured.step_ms),
            _ms(tier.floor_ms),
            "-" if tier.cost is None else f"{max(tier.cost, 1.0):.2f}",
            "-" if decoded is None or decoded.own_length is None else f"{decoded.own_length:.2f}",
            "-" if decoded is None else f"{decoded.tokens_per_second:.1f}",
        )
    return table


def _regions(tiers: Sequence[TierReport]) -> Table:
    # Names of trees are long and are split over lines.
    headings = [tier.name.replace(" ", "\n") for tier in tiers]
    table = _table("Milliseconds of a step; host is between steps and not in ms", "", *headings, numbers=headings)
    found = {tier.name: {cost.region: cost.ms for cost in tier.regions} for tier in tiers}
    for region, name in NAMES.items():
        if any(region in costs for costs in found.values()):
            # A rest of 0 is timing noise, not a measurement.
            table.add_row(name, *(_ms(costs.get(region) or None) for costs in found.values()))
    return table


def _passes(program: Program) -> Table:
    columns = ("pass", "calls", "+", "-", "what it changed")
    title = f"Passes of {program.name}"
    table = _table(title, *columns, numbers=("calls", "+", "-"), wrap=("what it changed",))
    for stage in program.stages:
        added, removed = sum(stage.added.values()), sum(stage.removed.values())
        table.add_row(
            stage.name,
            str(stage.nodes),
            str(added or ""),
            str(removed or ""),
            stage.note.replace(".default", "") or _change(stage),
        )
    return table


def _change(stage: StageReport) -> str:
    changes = [*((name, count) for name, count in stage.added.items())]
    changes += [(name, -count) for name, count in stage.removed.items()]
    changes.sort(key=lambda item: -abs(item[1]))
    shown = [f"{count:+} {name.removeprefix('aten.')}" for name, count in changes[:_SHOWN_CHANGES]]
    return ", ".join(shown) + (f", {len(changes) - len(shown)} more" if len(changes) > len(shown) else "")


def _kernels(tier: TierReport, backend: str | None) -> Table:
    columns = ("calls", "kernel", "ms", "whose")
    table = _table(f"Kernels of {tier.name}", *columns, numbers=("calls", "ms"), wrap=("whose",))
    body = {None: "body, not lowered", "eager": "body, run op by op"}.get(backend, f"body, compiled by {backend}")
    caller = ""
    for kernel in tier.kernels:
        if kernel.caller != caller:
            caller = kernel.caller
            table.add_section()
            table.add_row("", f"called by {caller}:", "", "")
        whose = body if kernel.kind == "body" else _KINDS[kernel.kind]  # type: ignore[index]
        table.add_row(str(kernel.calls), _shortened(kernel), _ms(kernel.ms), whose)
    return table


def _collectives(tier: TierReport) -> Table:
    numbers = ("calls", "bytes")
    table = _table(f"Collectives of {tier.name}", "calls", "collective", "of", "called by", "bytes", numbers=numbers)
    for call in tier.collectives:
        shape = f"{call.dtype}[{', '.join(map(str, call.shape))}]"
        table.add_row(str(call.calls), call.name, shape, call.caller, f"{call.nbytes:,}")
    return table


def _shortened(kernel: Kernel, most: int = 44) -> str:
    """Shorten a kernel's name in the middle. Inductor's names list all fused ops; ``--json`` has the whole name."""
    name = kernel.name.removeprefix("aten.") if kernel.kind == "stock" else kernel.name
    return name if len(name) <= most else f"{name[: most - 18]}...{name[-15:]}"


def _executables(report: Report) -> Table:
    table = _table("Executables", "", "rows x width", "ops", "bodies", numbers=("ops",), wrap=("bodies",))
    for item in report.executables:
        bodies = ", ".join(f"{count} x {body}" for body, count in item.bodies.items())
        table.add_row(item.name, f"{item.rows} x {item.width}", str(item.ops), bodies)
    return table


def _buffers(buffers: Sequence[Buffer]) -> Table:
    """One line for each shape of KV, over all layers, and one line for all tensors of sampling, of adapters and of the
    host each.
    """
    table = _table("Buffers of the arena", "group", "tensors", "type and shape", "bytes", numbers=("bytes",))
    lines: dict[tuple[str, ...], list[Buffer]] = {}
    for buffer in buffers:
        key: tuple[str, ...] = (buffer.group, buffer.name)
        if buffer.group in ("KV", "recurrent state"):
            key = (buffer.group, buffer.name.split("_")[0], str(buffer.shape), buffer.dtype)
        elif buffer.group in ("sampling", "adapters", "host"):
            key = (buffer.group,)
        lines.setdefault(key, []).append(buffer)
    for (group, *_), same in lines.items():
        first, last, alike = same[0], same[-1], len({(item.shape, item.dtype) for item in same}) == 1
        name = first.name if len(same) == 1 else f"{first.name} .. {last.name} ({len(same)})"
        if group in ("sampling", "adapters", "host"):
            name = f"{len(same)} tensors"
        shape = f"{first.dtype}[{', '.join(map(str, first.shape))}]" if alike else ""
        table.add_row(group, name, shape, f"{sum(item.nbytes for item in same):,}")
    if recurrent := sum(buffer.nbytes // buffer.shape[0] for buffer in buffers if buffer.group == "recurrent state"):
        table.add_row("recurrent state", "of one slot", "", f"{recurrent:,}", style="bold")
    total = sum(buffer.nbytes for buffer in buffers)
    table.add_row("arena", f"all {len(buffers)}", "", f"{total:,}", style="bold")
    return table


def _memory(report: Report) -> Table:
    table = _table("Memory", "", "tensors", "bytes", "MiB", numbers=("tensors", "bytes", "MiB"))
    groups: dict[str, list[int]] = {}
    for item in report.memory.items:
        total = groups.setdefault(item.path[0], [0, 0])
        total[0] += item.count
        total[1] += item.nbytes
    for name, (count, nbytes) in groups.items():
        table.add_row(name, str(count), f"{nbytes:,}", f"{nbytes / 2**20:,.1f}")
    for saving in report.memory.savings:
        table.add_row(f"{saving.option} saves", "", f"{saving.nbytes:,}", f"{saving.nbytes / 2**20:,.1f}")
    return table


def _explanation(lines: dict[str, str]) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for name, text in lines.items():
        table.add_row(name, Text(text))
    return Padding(table, 0)
