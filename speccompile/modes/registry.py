"""The registry of modes by name: those of this package, registered ones, and those of installed packages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pkgutil import resolve_name
from typing import Any, NoReturn

from torch import nn

from speccompile.errors import DuplicateMode, InvalidOption, OptionOfAnotherMode, UnknownMode, UnknownOption
from speccompile.modes.auto import Auto
from speccompile.modes.base import Mode
from speccompile.modes.composed import Composed
from speccompile.modes.lookup_first import LookupFirst, lookup_first
from speccompile.modes.network.network_mode import NetworkMode
from speccompile.modes.ready_mode import ReadyMode
from speccompile.utils.mode_names import CLASSES, installed_modes

BUILT_IN: tuple[type[Mode], ...] = tuple(map(resolve_name, CLASSES.values()))

_modes: dict[str, type[Mode]] = {mode.name: mode for mode in BUILT_IN}


def register(name: str, mode: type[Mode], *, replace: bool = False) -> None:
    """Register ``mode`` as ``name``. Upper and lower case are equal.

    Args:
        replace: replace a mode of that name.

    Raises:
        DuplicateMode: the name exists, and ``replace`` is False.
        InvalidOption: ``mode`` is not a subclass of :class:`Mode`.
    """
    _check(name, mode)
    key = name.lower()
    if key == Auto.name:
        raise DuplicateMode(name=key, owner=f"{Auto.__module__}, which chooses among all others")
    if key in _modes and not replace:
        raise DuplicateMode(name=key, owner=f"{_modes[key].__module__}.{_modes[key].__qualname__}")
    _modes[key] = mode


def _check(name: Any, mode: Any) -> None:
    def refuse(field: str, value: Any, reason: str) -> None:
        raise InvalidOption(where="register_mode", name=field, value=value, reason=reason)

    if not isinstance(name, str) or not name:
        refuse("name", name, "it must be a str that is not empty")
    if not (isinstance(mode, type) and issubclass(mode, Mode)):
        refuse("mode", mode, "it must be a subclass of speccompile.modes.Mode")
    if not isinstance(getattr(mode, "name", None), str):
        refuse("mode", mode, "it must have a class variable name, a str")


def available() -> list[str]:
    """The names that ``wrap(mode=...)`` accepts."""
    return sorted(_modes.keys() | installed_modes().keys() | {Auto.name})


def check_options(name: str, options: Collection[str]) -> None:
    """Check names of options of one mode before it is created.

    Raises:
        UnknownMode: no mode has that name.
        UnknownOption: the mode does not accept one of the options.
    """
    known = Auto.options if name.lower() == Auto.name else _type(name).options()
    _check_known(f"--option of mode {name!r}", options, (), known)


def options_of(names: Sequence[str]) -> set[str]:
    """The names of the options of a mode, or of a composition of several.

    Raises:
        UnknownMode: no mode has one of ``names``.
    """
    if [name.lower() for name in names] == [Auto.name]:
        return set(Auto.options)
    own = {"min_score"} if len(names) > 1 else set()
    return own.union(*(_type(name).options() for name in names))


def create(
    name: str | Sequence[str] | None, options: dict[str, Any], *, others: Sequence[str] = ("the arguments of wrap",)
) -> Mode | Auto:
    """Create the mode called ``name``, with its options. Upper and lower case are equal, and None is ``none``.

    Several names are a composition. Each of its modes receives the options that it accepts. ``auto`` is not a mode: it
    chooses one.

    Args:
        others: further arguments of the caller, for messages.

    Raises:
        UnknownMode: no mode has that name.
        UnknownOption: the mode does not accept one of the options.
        InvalidOption: a value is not valid, or modes do not compose.
    """
    if isinstance(name, nn.Module):
        reason = "it must be a name, got a model; to draft with a model use wrap(target, draft=model)"
        raise InvalidOption(where="wrap", name="mode", value=name, reason=reason)
    if isinstance(name, list | tuple):
        return _compose(name, options, others)
    if isinstance(name, str) and name.lower() == Auto.name:
        _check_known("wrap(mode='auto')", options, others, Auto.options)
        return Auto(**options)
    mode = _type(name)
    _check_known(f"wrap(mode={_key(name)!r})", options, others, mode.options())
    return mode(**options)


def _compose(names: Sequence[str], options: dict[str, Any], others: Sequence[str]) -> Composed | LookupFirst:
    def refuse(reason: str) -> NoReturn:
        raise InvalidOption(where="wrap", name="mode", value=list(names), reason=reason)

    if len(names) < 2:
        refuse("a composition has two drafters or more; give one drafter as a str")
    if any(str(name).lower() == Auto.name for name in names):
        refuse(f"{Auto.name!r} is not a drafter: it chooses one; give only it, as a str")
    types = [_type(name) for name in names]
    if len(set(types)) < len(types):
        refuse("each drafter must occur once, and one occurs twice")
    own = {"min_score"}
    known = own.union(*(mode.options() for mode in types))
    _check_known(f"wrap(mode={list(names)})", options, others, sorted(known))
    ready: list[ReadyMode] = []
    shared = {option: value for option, value in options.items() if option in own}
    for name, mode in zip(names, types, strict=True):
        drafter = mode(**{option: value for option, value in options.items() if option in mode.options()})
        if isinstance(drafter, NetworkMode) and len(ready) == len(names) - 1:
            return lookup_first(tuple(ready), drafter, **shared)
        if not isinstance(drafter, ReadyMode):
            last = "; a drafter with a network comes last" if isinstance(drafter, NetworkMode) else ""
            refuse(
                f"{name!r} does not propose at the end of a step, from the sequence only, as composition requires{last}"
            )
        ready.append(drafter)
    return Composed(tuple(ready), **shared)


def _key(name: Any) -> str:
    return "none" if name is None else str(name).lower()


def _type(name: Any) -> type[Mode]:
    key = _key(name)
    if key not in _modes and key in installed_modes():
        # Only the requested mode is loaded: an error in another package must not matter.
        register(key, installed_modes()[key].load())
    if key not in _modes:
        raise UnknownMode(name=name, available=", ".join(available()))
    return _modes[key]


def _check_known(where: str, options: Collection[str], others: Sequence[str], known: Sequence[str]) -> None:
    if unknown := sorted(set(options) - set(known)):
        details = {"where": where, "names": ", ".join(unknown), "known": ", ".join([*others, *known]) or "no options"}
        if modes := ". ".join(filter(None, map(_modes_with, unknown))):
            raise OptionOfAnotherMode(**details, modes=modes)
        raise UnknownOption(**details)


def _modes_with(option: str) -> str:
    """A sentence with the modes that have an option, for an error; empty if no mode has it."""
    names = [repr(name) for name, mode in sorted(_modes.items()) if option in mode.options()]
    if option in Auto.options:
        of = "'auto', which chooses a mode by it" + (f", and of {', '.join(names)}" if names else "")
    else:
        of = ", ".join(names)
    return f"{option}= is an option of mode={of}" if of else ""
