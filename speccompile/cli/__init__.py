"""The command line: ``speccompile demo``, ``generate``, ``inspect``, ``families``, ``policy-lab`` and
``save-hidden-states``."""

import typer

import speccompile.cli.demo as demo
import speccompile.cli.families as families
import speccompile.cli.generate as generate
import speccompile.cli.inspect as inspect
import speccompile.cli.policy_lab as policy_lab
import speccompile.cli.save_hidden_states as save_hidden_states

app = typer.Typer(
    name="speccompile",
    help="Speculative decoding for Hugging Face models, built around torch.compile.",
    no_args_is_help=True,
    add_completion=False,
)
app.command("demo")(demo.command)
app.command("generate")(generate.command)
app.command("inspect")(inspect.command)
app.command("families")(families.command)
app.command("policy-lab")(policy_lab.command)
app.command("save-hidden-states")(save_hidden_states.command)

__all__ = ["app"]
