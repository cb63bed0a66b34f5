"""Context of every command: one-line errors, filtered warnings, progress; and parsers of its options."""

from __future__ import annotations

import ast
import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import typer

from speccompile.compiler.options import read_tiers
from speccompile.errors import InvalidOption, InvalidTiers, SpecCompileError
from speccompile.graph.tree import Tree

EXIT_USER_ERROR = 2
#: Seconds after which a command that has not begun prints a line.
START_SECONDS = 2.0


_starting: list[threading.Timer] = []


def announce_start() -> Callable[[], None]:
    """Print a line on stderr unless :func:`session` begins within two seconds. On a slow machine importing torch and
    transformers lasts longer.

    Returns:
        A function that cancels the line.
    """
    timer = threading.Timer(START_SECONDS, typer.echo, ("importing torch and transformers ...",), {"err": True})
    timer.daemon = True
    timer.start()
    _starting.append(timer)
    return _end_announcement


def _end_announcement() -> None:
    while _starting:
        _starting.pop().cancel()


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Print an error of this package as one line on stderr.

    Raises:
        typer.Exit: with code 2, after such an error.
    """
    try:
        yield
    except SpecCompileError as error:
        typer.echo(f"error: {_one_line(error)}", err=True)
        raise typer.Exit(EXIT_USER_ERROR) from None


@contextlib.contextmanager
def session() -> Iterator[None]:
    """Run a command's body with :func:`one_line_errors`, only this package's warnings, and progress on stderr.

    Raises:
        typer.Exit: with code 2, after an error of this package.
    """
    # Imported here, since it imports transformers, and checks of arguments do not need that.
    from speccompile.cli.progress import show_tasks

    _end_announcement()
    with _only_own_warnings(), one_line_errors(), show_tasks():
        yield


@contextlib.contextmanager
def _only_own_warnings() -> Iterator[None]:
    from transformers.utils import logging as hf_logging

    before = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # The package's warnings are attributed to its caller, which is a command (see speccompile.utils.warn).
            warnings.filterwarnings("always", category=UserWarning, module=r"speccompile\.")
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            yield
    finally:
        hf_logging.set_verbosity(before)


def _show_warning(message: Warning | str, *_: object) -> None:
    typer.echo(f"warning: {_one_line(message)}", err=True)


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def parse_tiers(text: str) -> tuple[int, ...]:
    """Parse ``"0,1,3,7"`` to draft lengths. ``"tree:8:6:3"`` is a dynamic tree of 8 nodes, depth 6 and 3 branches.

    Raises:
        InvalidTiers: an item is neither of these, or the tiers are not valid.
    """
    return read_tiers(_tier(item.strip(), text) for item in text.split(","))


def _tier(item: str, text: str) -> int:
    kind, *numbers = item.split(":")
    if kind == "tree" and len(numbers) == 3 and all(number.isdecimal() for number in numbers):
        nodes, depth, branches = map(int, numbers)
        return Tree.dynamic(nodes, depth, branches)
    if not item.isdecimal():
        raise InvalidTiers(tiers=text, reason=f"{item!r} must be a draft length or a tree (tree:NODES:DEPTH:BRANCHES)")
    return int(item)


def parse_layers(text: str) -> tuple[int, ...]:
    """Parse ``"1,14,26"`` to layers. ``wrap`` checks them further.

    Raises:
        InvalidOption: an item is not a whole number.
    """
    try:
        return tuple(int(item) for item in text.split(","))
    except ValueError:
        reason = "write it as 1,14,26"
        raise InvalidOption(where="the command line", name="--layers", value=text, reason=reason) from None


def parse_adapters(items: Sequence[str], option: str = "--lora-modules") -> dict[str, str]:
    """Parse ``["legal=adapters/legal"]``, the values of ``option``, to sources by name.

    Raises:
        InvalidOption: an item is not ``name=source``, or a name occurs twice.
    """
    adapters: dict[str, str] = {}
    for item in items:
        name, _, source = item.partition("=")
        if not name or not source or name in adapters:
            reason = "write each as name=folder, with its own name"
            raise InvalidOption(where="the command line", name=option, value=item, reason=reason)
        adapters[name] = source
    return adapters


def parse_heads(items: Sequence[str], adapters: Mapping[str, str]) -> dict[str, str]:
    """Parse ``["legal=heads/legal"]`` to the draft heads of ``adapters``, by name.

    Raises:
        InvalidOption: an item is not ``name=source`` with the name of an adapter, or a name occurs twice.
    """
    heads = parse_adapters(items, "--lora-heads")
    for name in heads:
        if name not in adapters:
            reason = f"no adapter is named {name!r}; add --lora-modules {name}=FOLDER"
            raise InvalidOption(where="the command line", name="--lora-heads", value=name, reason=reason)
    return heads


def parse_options(items: Sequence[str]) -> dict[str, Any]:
    """Parse ``["max_ngram=3"]`` to keyword arguments. A value that is not a Python literal is a str.

    Raises:
        InvalidOption: an item is not ``name=value``.
    """
    options: dict[str, Any] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name.isidentifier():
            raise InvalidOption(where="the command line", name="--option", value=item, reason="write it as name=value")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options
