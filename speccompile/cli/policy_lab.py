"""``speccompile policy-lab``: compare policies over a recorded or synthetic trace, in simulated time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from speccompile.cli.session import one_line_errors, parse_tiers
from speccompile.errors import InvalidOption
from speccompile.policies import CostTable, Fixed, Ladder, parse_policy
from speccompile.runtime.trace_reader import read_trace
from speccompile.tools.policy_lab.cost_tables import TABLES, cost_table
from speccompile.tools.policy_lab.plot import plot
from speccompile.tools.policy_lab.simulate import SimulatedRun, oracle, simulate
from speccompile.tools.policy_lab.synthetic import TRACES, synthetic_texts
from speccompile.tools.policy_lab.texts import Text, texts_of

ORACLE = "oracle"


def run(
    trace: str,
    policy: Sequence[str] | None,
    costs: str | None,
    tiers: str | None,
    rows: int | None,
    seed: int,
    late: bool,
    plot_to: Path | None,
) -> None:
    """See ``speccompile policy-lab --help``."""
    with one_line_errors():
        if costs is not None and costs not in TABLES:
            reason = f"choose from {', '.join(TABLES)}"
            raise InvalidOption(where="policy-lab", name="costs", value=costs, reason=reason)
        draft_lens = None if tiers is None else parse_tiers(tiers)
        texts, table, whose, draft_lens, ready, censored = _load(trace, costs, draft_lens, seed)
        ladder = Ladder(draft_lens, table)
        most = table.row_counts[-1]
        if rows is not None and rows > most:
            reason = f"the costs {whose} are known of {most} rows at most"
            raise InvalidOption(where="policy-lab", name="rows", value=rows, reason=reason)
        rows = rows or min(8, most)
        policies = [parse_policy(text, draft_lens) for text in policy or ("cost", "ema", "gate")]
        outcomes = {
            str(item): simulate(item, texts, ladder, table, max_rows=rows, late=late, ready=ready)
            for item in [*(Fixed(k) for k in draft_lens), *policies]
        }
        outcomes[ORACLE] = oracle(texts, ladder, table, max_rows=rows, ready=ready)
        Console().print(_table(trace, whose, outcomes, [str(Fixed(k)) for k in draft_lens]))
        if censored:
            typer.echo(
                f"{censored:.0%} of its drafts were cut off by a small tier, and their outcome is not known: "
                "record with the largest tier"
            )
        if plot_to is not None:
            plot(plot_to, trace, outcomes)
            typer.echo(f"wrote {plot_to}")


def _load(
    trace: str, costs: str | None, draft_lens: tuple[int, ...] | None, seed: int
) -> tuple[Sequence[Text], CostTable, str, tuple[int, ...], bool, float]:
    """Texts; costs and their source; tiers; whether tiers follow the available drafts; and the share of a recorded
    trace whose outcome is unknown."""
    named = costs or "cpu"
    if trace in TRACES:
        draft_lens = draft_lens or (0, 1, 3, 7)
        return synthetic_texts(trace, seed), cost_table(named, draft_lens), f"{named!r}", draft_lens, False, 0.0
    recorded = read_trace(trace, draft_lens)
    draft_lens = draft_lens or recorded.draft_lens
    table, whose = recorded.costs, "of the trace"
    if costs is not None or table is None or not set(draft_lens) <= set(table.draft_lens):
        table, whose = cost_table(named, draft_lens), f"{named!r}"
    return texts_of(recorded), table, whose, draft_lens, recorded.ready, recorded.censored


def _table(trace: str, whose: str, outcomes: Mapping[str, SimulatedRun], statics: Sequence[str]) -> Table:
    best = max(outcomes[name].speed for name in statics)
    table = Table(title=f"{trace}: {outcomes[ORACLE].tokens} tokens", caption=f"costs {whose}")
    table.title_justify = table.caption_justify = "left"
    table.add_column("policy")
    for name in ("tokens/s", "to the best static", "steps", "tokens a step"):
        table.add_column(name, justify="right")
    table.add_column("share of steps at each K")
    for name, outcome in outcomes.items():
        shares = ", ".join(f"{k}: {steps / outcome.steps:.0%}" for k, steps in outcome.residency.items())
        ratio = outcome.speed / best
        cells = (f"{1e3 * outcome.speed:.1f}", f"{ratio:.3f}", str(outcome.steps), f"{outcome.acceptance_length:.2f}")
        table.add_row(name, *cells, shares, style="bold" if name not in (*statics, ORACLE) else None)
        if name == statics[-1]:
            table.add_section()
    return table
