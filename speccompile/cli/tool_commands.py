"""Commands for families of models and for policies, with their options. Imports as in ``commands.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from speccompile.cli.arguments import Backend, check_backend, check_device
from speccompile.cli.files import check_output_file
from speccompile.cli.session import one_line_errors
from speccompile.tools.policy_lab.cost_tables import TABLES
from speccompile.tools.policy_lab.synthetic import TRACES
from speccompile.utils.model_names import check_families

tools = typer.Typer()


@tools.command("families")
def families(
    names: Annotated[
        list[str] | None, typer.Argument(help="Families, by the model_type of their config; all if left out.")
    ] = None,
    backend: Backend = "eager",
    device: Annotated[str, typer.Option(help="cpu, cuda, or cuda:N. Tiny models need no GPU.")] = "cpu",
    only: Annotated[
        Literal["exact", "refused", "not made", "wrong", "broken"] | None,
        typer.Option(help="Show only the rows with this result; all are counted."),
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write all rows to this file, as JSON.")] = None,
) -> None:
    """Try a tiny random model of every causal-LM family of transformers: is its text exact, or why is it refused?

    `exact`: the text of transformers' generate, in ragged batches, with changing tiers
    `refused`: wrap reports what it does not support
    `not made`: no tiny model exists, or transformers cannot generate with it
    `wrong`, `broken`: faults of speccompile; the exit code is then 1
    `route`: attention (layers call the attention op) or eager (they keep their own)
    `acceptance length`: after a periodic prompt; 1.00 if no draft was accepted

    All families, about 190, need 20 minutes on two cores; give names to try only these.
    """
    with one_line_errors():
        check_backend(backend)
        check_device(device)
        check_families(names or ())
        check_output_file("--json", json_path)
    from speccompile.cli import families

    families.run(names, backend, device, only, json_path)


@tools.command("policy-lab")
def policy_lab(
    trace: Annotated[
        str, typer.Argument(help=f"A file that spec.record_trace wrote, or one of {', '.join(TRACES)}.")
    ] = "phases",
    policy: Annotated[list[str] | None, typer.Option(help="A policy as wrap accepts it; may repeat.")] = None,
    costs: Annotated[
        str | None,
        typer.Option(help=f"Costs of tiers: {', '.join(TABLES)}; those of the trace, else cpu, if left out."),
    ] = None,
    tiers: Annotated[str | None, typer.Option(help="Draft lengths; those of the trace if left out.")] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Most requests at a time; if left out 8, or as many as have costs.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of a synthetic trace.")] = 0,
    late: Annotated[bool, typer.Option("--late", help="Policies receive results one step later.")] = False,
    plot_to: Annotated[Path | None, typer.Option("--plot", help="A PNG to write.")] = None,
) -> None:
    """Compare policies with every static tier and with an oracle that knows what drafts are worth."""
    with one_line_errors():
        check_output_file("--plot", plot_to)
    from speccompile.cli import policy_lab

    policy_lab.run(trace, policy, costs, tiers, rows, seed, late, plot_to)
