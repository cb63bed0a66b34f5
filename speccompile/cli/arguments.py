"""Arguments that several commands accept, and checks of them before torch is imported."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from speccompile.compiler.options import DEFAULT_TIERS, WrapOptions
from speccompile.errors import InvalidAdapter, InvalidOption, UnknownBackend, UnknownMode
from speccompile.utils.device_names import check_device_name
from speccompile.utils.hub import ADAPTER_CONFIG, check_reachable, unavailable
from speccompile.utils.kv_forms import KV_FORMS
from speccompile.utils.mode_names import AUTO, CLASSES, installed_modes
from speccompile.utils.model_names import MODEL_HELP, check_model_name, is_hub_id
from speccompile.utils.options import Options
from speccompile.utils.weight_forms import WEIGHT_FORMS

# Backends. `speccompile.lowering.backends` defines them, but imports torch.
_BACKENDS = ("auto", "eager", "inductor", "cudagraph")

#: Value of ``--weights`` for the integers of a quantised checkpoint.
STORED = "stored"
#: Values of ``--weights``.
_FORMS = (*WEIGHT_FORMS, STORED)

#: Contents of the files of ``--prompts``.
PROMPT_LINES = (
    'a text file with a prompt in each line, or *.jsonl with lines like {"turns": ["..."]} (Spec-Bench) or '
    '{"prompt": "..."} (HumanEval)'
)
#: Default tiers in the form of ``--tiers``.
TIERS = ",".join(map(str, DEFAULT_TIERS))


def modes() -> list[str]:
    """Names of the modes of this package and of installed packages."""
    return sorted({AUTO, *CLASSES, *installed_modes()})


def check_mode(name: str) -> None:
    """Raise UnknownMode unless a mode has the name ``name``."""
    if name.lower() not in modes():
        raise UnknownMode(name=name, available=", ".join(modes()))


def parse_mode(text: str) -> str | list[str]:
    """Parse ``"suffix+ngram"`` to ``["suffix", "ngram"]``. A single name stays as it is."""
    names = text.split("+")
    return names if len(names) > 1 else text


def check_backend(name: str) -> None:
    """Raise UnknownBackend unless a backend has the name ``name``."""
    if name not in _BACKENDS:
        raise UnknownBackend(name=name, available=", ".join(_BACKENDS))


def check_address(host: str, port: int) -> None:
    """Check before a model is loaded that a server can listen on the address.

    Raises:
        InvalidOption: the address cannot be bound.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        reason = f"{host}:{port} cannot be bound ({error.strerror}); give another --port or --host"
        raise InvalidOption(where="the command line", name="--port", value=port, reason=reason) from error


def check_wrap(model: str, options: WrapOptions, device: str | None) -> None:
    """Check the name of a model, the options of its wrap, and the name of its device.

    Raises:
        PretrainedError, UnknownMode, UnknownOption, UnknownBackend, UnknownDevice.
    """
    check_device(device)
    mode = "none" if options.mode is None else options.mode
    for name in [mode] if isinstance(mode, str) else mode:
        check_mode(name)
    if options.mode_options and isinstance(mode, str):
        # The modes import torch.
        from speccompile.modes.registry import check_options

        check_options(mode, options.mode_options)
    check_backend(options.backend)
    check_model(model)


def check_device(name: str | None) -> None:
    """Raise UnknownDevice if ``name`` is not the name of a device."""
    if name is not None:
        check_device_name(name)


def check_model(name: str) -> None:
    """Raise PretrainedError if ``name`` is not the name of a model."""
    check_model_name(name)
    if is_hub_id(name):
        check_reachable(name)


def check_adapters(adapters: Mapping[str, str]) -> None:
    """Check before a model is loaded that the sources of adapters exist.

    Raises:
        InvalidAdapter: a source does not exist.
    """
    for name, source in adapters.items():
        if (reason := unavailable(source, ADAPTER_CONFIG)) is not None:
            raise InvalidAdapter(name=name, source=source, reason=reason)


def form_of(weights: str) -> Any:
    """Argument of ``wrap`` for ``--weights``. With :data:`STORED` the integers of the checkpoint replace it.

    Raises:
        InvalidOption: the form is unknown.
    """
    if weights not in _FORMS:
        reason = f"choose from {', '.join(_FORMS)}"
        raise InvalidOption(where="the command line", name="--weights", value=weights, reason=reason)
    return "same" if weights == STORED else weights


def option_of(
    options: type[Options],
    name: str,
    *flags: str,
    more: str = "",
    envvar: str | None = None,
    panel: str | None = None,
) -> Any:
    """Create a command-line option from a field of an :class:`Options`.

    Args:
        flags: spelling of the option, if it does not follow from its name.
        more: text after the option's own sentence.
        envvar: environment variable with the value if the option is left out.
        panel: heading in the help; None is that of all options.
    """
    help = f"{options.sentence(name)} {more}".rstrip()
    return typer.Option(*flags, help=help, min=options.least(name), envvar=envvar, rich_help_panel=panel)


Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
ModelOption = Annotated[str, typer.Option("--model", help=MODEL_HELP)]
Mode = Annotated[str, option_of(WrapOptions, "mode", more=f"One of {', '.join(modes())}; or several, joined by +.")]
_TIERS_HELP = "Draft lengths to build, 0 among them, and trees as tree:NODES:DEPTH:BRANCHES, such as 0,3,7,tree:8:6:3."
Tiers = Annotated[str, typer.Option(help=_TIERS_HELP)]
SomeTiers = Annotated[
    str | None, typer.Option(help=f"{_TIERS_HELP} {TIERS}, or as many as the drafter has, if left out.")
]
Backend = Annotated[str, option_of(WrapOptions, "backend", more=f"{', '.join(_BACKENDS[:-1])} or {_BACKENDS[-1]}.")]
Device = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda, or cuda:N for the GPU of number N. A GPU is used if there is one."),
]
MaxLen = Annotated[int | None, option_of(WrapOptions, "max_len")]
_WEIGHTS_HELP = "same, int8, int4, or stored: the integers of a quantised checkpoint, which are dequantised otherwise."
Weights = Annotated[str, option_of(WrapOptions, "weights", more=_WEIGHTS_HELP)]
KV = Annotated[str, option_of(WrapOptions, "kv", more=f"{', '.join(KV_FORMS[:-1])} or {KV_FORMS[-1]}.")]
KVMemory = Annotated[str | None, option_of(WrapOptions, "kv_memory")]
CalibrationFile = Annotated[Path | None, option_of(WrapOptions, "calibration")]
MaxBatch = Annotated[int, option_of(WrapOptions, "max_batch")]
Policy = Annotated[
    str | None,
    option_of(WrapOptions, "policy", more="fixed:K, schedule:ROWS=K,..., cost, ema or gate; cost if left out."),
]
ModeOptions = Annotated[
    list[str] | None, typer.Option("--option", help="An option of the mode, name=value; may repeat.")
]
