"""Arguments that several commands accept, and checks of them before torch is imported."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer

from speccompile.compiler.options import DEFAULT_TIERS, WrapOptions
from speccompile.errors import InvalidAdapter, InvalidOption, UnknownBackend, UnknownMode, UnknownOption
from speccompile.utils.device_names import check_device_name
from speccompile.utils.hub import ADAPTER_CONFIG, check_reachable, unavailable
from speccompile.utils.model_names import MODEL_HELP, check_model_name, is_hub_id
from speccompile.utils.options import Options

# Modes with their options, and backends. `speccompile.modes` and `speccompile.lowering.backends` define them, but
# import torch.
_NETWORK = ("draft", "draft_max_len", "draft_weights")
_MODES = {
    "auto": ("head", "draft", "predictions"),
    "dflash": (*_NETWORK, "fused", "block_size"),
    "draft_target": (*_NETWORK, "fused", "mask_token_id"),
    "eagle3": (*_NETWORK, "fused", "confidence"),
    "eagle3_one_model": (*_NETWORK, "fused", "confidence"),
    "early_exit": ("exit_layer",),
    "medusa": ("draft",),
    "mtp": (*_NETWORK, "chain"),
    "mtp_eagle": (*_NETWORK, "fused", "confidence"),
    "mtp_eagle_one_model": (*_NETWORK, "fused", "confidence"),
    "ngram": ("max_ngram", "min_ngram"),
    "none": (),
    "prediction": (),
    "save_hidden_states": ("output_directory", "write_interval", "file_prefix", "eagle3_layers_to_capture"),
    "suffix": ("max_depth", "factor", "offset", "min_probability", "corpus", "tokenizer", "remember"),
    "user_provided": ("draft", "host", "reads_hidden"),
}
_BACKENDS = ("auto", "eager", "inductor", "cudagraph")
_ENTRY_POINTS = "speccompile.modes"

#: Value of ``--weights`` for the integers of a quantised checkpoint.
STORED = "stored"
#: Values of ``--weights``.
_FORMS = ("same", "int8", "int4", STORED)

#: Contents of the files of ``--prompts``.
PROMPT_LINES = (
    'a text file with a prompt in each line, or *.jsonl with lines like {"turns": ["..."]} (Spec-Bench) or '
    '{"prompt": "..."} (HumanEval)'
)
#: Default tiers in the form of ``--tiers``.
TIERS = ",".join(map(str, DEFAULT_TIERS))


def modes() -> list[str]:
    """Names of the modes of this package and of installed packages."""
    return sorted({*_MODES, *(point.name.lower() for point in entry_points(group=_ENTRY_POINTS))})


def check_mode(name: str) -> None:
    """Raise UnknownMode unless a mode has the name ``name``."""
    if name.lower() not in modes():
        raise UnknownMode(name=name, available=", ".join(modes()))


def parse_mode(text: str) -> str | list[str]:
    """Parse ``"suffix+ngram"`` to ``["suffix", "ngram"]``. A single name stays as it is."""
    names = text.split("+")
    return names if len(names) > 1 else text


def check_options(mode: str | Sequence[str], options: Collection[str]) -> None:
    """Check the names of the options of one of this package's modes. Options of an installed package's mode, and of
    several modes, are checked when the modes are loaded.

    Raises:
        UnknownOption: ``mode`` does not have the options.
    """
    known = _MODES.get(mode.lower()) if isinstance(mode, str) else None
    if known is not None and (unknown := sorted(set(options) - set(known))):
        where, names = f"--option of mode {mode!r}", ", ".join(unknown)
        raise UnknownOption(where=where, names=names, known=", ".join(known) or "no options")


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
    check_options(mode, options.mode_options.keys())
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
CalibrationFile = Annotated[Path | None, option_of(WrapOptions, "calibration")]
MaxBatch = Annotated[int, option_of(WrapOptions, "max_batch")]
Policy = Annotated[
    str | None,
    option_of(WrapOptions, "policy", more="fixed:K, schedule:ROWS=K,..., cost, ema or gate; cost if left out."),
]
ModeOptions = Annotated[
    list[str] | None, typer.Option("--option", help="An option of the mode, name=value; may repeat.")
]
