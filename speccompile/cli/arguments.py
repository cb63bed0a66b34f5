"""Arguments that several commands accept, and what can be checked of them before torch is imported."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Annotated

import typer

from speccompile.errors import UnknownBackend, UnknownMode
from speccompile.utils.model_names import MODEL_HELP

# Names that `speccompile.modes` and `speccompile.lowering.backends` define; these import torch.
_MODES = (
    "auto",
    "draft_target",
    "eagle3",
    "eagle3_one_model",
    "early_exit",
    "mtp",
    "mtp_eagle",
    "mtp_eagle_one_model",
    "ngram",
    "none",
    "save_hidden_states",
    "suffix",
    "user_provided",
)
_BACKENDS = ("auto", "eager", "inductor", "cudagraph")
_ENTRY_POINTS = "speccompile.modes"


def modes() -> list[str]:
    """Names of the modes of this package and of installed packages."""
    return sorted({*_MODES, *(point.name.lower() for point in entry_points(group=_ENTRY_POINTS))})


def check_mode(name: str) -> None:
    """Raises: UnknownMode."""
    if name.lower() not in modes():
        raise UnknownMode(name=name, available=", ".join(modes()))


def check_backend(name: str) -> None:
    """Raises: UnknownBackend."""
    if name not in _BACKENDS:
        raise UnknownBackend(name=name, available=", ".join(_BACKENDS))


Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
ModelOption = Annotated[str, typer.Option("--model", help=MODEL_HELP)]
Mode = Annotated[str, typer.Option(help=f"How to draft: {', '.join(modes())}.")]
Tiers = Annotated[str, typer.Option(help="Draft lengths to build, 0 among them.")]
Backend = Annotated[str, typer.Option(help=f"{', '.join(_BACKENDS[:-1])} or {_BACKENDS[-1]}.")]
MaxLen = Annotated[
    int | None,
    typer.Option(min=2, help="Most tokens of a sequence; 2048, or as many positions as the model has, if left out."),
]
Options = Annotated[list[str] | None, typer.Option("--option", help="An option of the mode, name=value; may repeat.")]
