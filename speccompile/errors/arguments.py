"""Arguments of ``wrap``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from speccompile.errors.base import SpecCompileError, UserError


class UnknownMode(UserError):
    """No mode is registered under that name."""

    template = (
        "unknown mode {name!r}. Available: {available}. "
        "Register your own mode with speccompile.register_mode(name, cls)."
    )


class DuplicateMode(UserError):
    """A mode is registered under a name that another mode has."""

    template = "mode {name!r} is already registered by {owner}; choose another name or pass replace=True."


class UnknownOption(UserError):
    """A keyword argument is not a known option. The message suggests options with similar names."""

    template = "{where} does not accept {names}.{similar} It accepts: {known}."

    def __init__(self, message: str | None = None, **fields: Any) -> None:
        if message is None:
            fields.setdefault("similar", _suggestion(fields["names"].split(", "), fields["known"].split(", ")))
        super().__init__(message, **fields)


def similar_option(name: str, known: Iterable[str]) -> str | None:
    """Return the name of ``known`` that is most similar to ``name``, or None if no name is similar."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)), None)


def _longer_or_shorter(name: str, known: Iterable[str]) -> str | None:
    """Return a name of ``known`` that extends ``name``, or that ``name`` extends: ``stop`` and ``stop_strings``."""
    return next((other for other in known if other.startswith(f"{name}_") or name.startswith(f"{other}_")), None)


def _suggestion(names: Iterable[str], known: Sequence[str]) -> str:
    found = dict.fromkeys(
        filter(None, (similar_option(name, known) or _longer_or_shorter(name, known) for name in names))
    )
    return f" Did you mean {', '.join(found)}?" if found else ""


class OptionOfAnotherMode(UnknownOption):
    """An option belongs to another mode than the chosen one."""

    template = UnknownOption.template + " {modes}."


class InvalidOption(UserError):
    """An option has a value that is not valid."""

    template = "{where}: {name}={value!r} is not valid: {reason}."


class StateTooLarge(UserError):
    """The state of a wrap does not fit in the memory of its device."""

    template = (
        "the state of max_batch={max_batch} requests of max_len={max_len} tokens needs {gibibytes:.1f} GiB, which "
        "{device} does not have ({largest!r} needs {of_largest:.1f} of them). Give a smaller max_len or max_batch."
    )


class InvalidTiers(UserError):
    """``tiers`` of ``wrap`` are not valid."""

    template = (
        "tiers={tiers!r} is not valid: {reason}. Give distinct draft lengths that include 0 "
        "(the plain decoder), for example tiers=(0, 1, 3, 7)."
    )


class UnknownTier(UserError):
    """The chosen draft length was not built."""

    template = "no tier with draft length {tier!r} was built; built: {built}. Add it to tiers=... of wrap."


class InvalidPolicy(UserError):
    """A policy cannot be read, or names a tier that is not built."""

    template = (
        "policy={policy!r} is not valid: {reason}. Use 'fixed:K' (for example 'fixed:7'), "
        "'schedule:ROWS=K,...' (from so many live rows on, for example 'schedule:1=7,4=3,8=0', or up to so many: "
        "'schedule:<=4=7,<=8=3'), 'cost', 'ema' or 'gate' (with options: "
        "'ema:alpha=0.3,candidates=0/3/7'), or an object with choose(live_rows) -> K."
    )


class InvalidTrace(UserError):
    """A recorded trace cannot be replayed."""

    template = "{path} cannot be replayed: {reason}. spec.record_trace(path) writes one."


class InvalidResults(UserError):
    """A file of results cannot be read, or does not belong to the others."""

    template = "{path} cannot be used: {reason}. `speccompile bench` writes files of results."


class UnknownBackend(UserError):
    """No backend is registered under that name."""

    template = "unknown backend {name!r}. Available: {available}."


class NeedsCuda(UserError):
    """The model of a CUDA backend is on another device."""

    template = (
        "backend={name!r} needs a model on a CUDA device, and this one is on {device}. Move it with model.to('cuda') "
        "(--device cuda on the command line), or use backend='auto'."
    )


class UnknownDevice(UserError):
    """A device does not exist, or speccompile does not run on it."""

    template = "device {name!r} cannot be used: {reason}. Devices are cpu, cuda, and cuda:N for the GPU of number N."


class DeviceMemoryFull(UserError):
    """A GPU has less free memory than a model or a wrap needs."""

    template = (
        "{device} does not have enough memory for {what}: {needed}, and {free} of its {total} are free. {advice}, or "
        "choose another device."
    )


class HostMemoryFull(UserError):
    """The machine has less free memory than weights need."""

    template = (
        "this machine does not have enough memory for {what}: {needed} are needed, and {free} of its {total} are free. "
        "End other programs, or choose a smaller model or a smaller form of weights."
    )


class UnknownAcceptance(UserError):
    """No acceptance rule is registered under that name."""

    template = "unknown acceptance rule {name!r}. Available: {available}."


class UnsupportedProcessor(UserError):
    """A logits processor cannot become part of a step."""

    template = (
        "logits_processor {name} cannot become part of a step: {reason}. {advice}. A processor that is passed to a "
        "request, spec.generate(..., logits_processor=...) or submit, may be any Python code: it is called on the host "
        "before each token, and that request has no drafts."
    )


class FreeOriginalsUnavailable(UserError):
    """``free_originals=True`` cannot keep only one copy of the weights for this model."""

    template = "free_originals=True is not available: {reason}. Use free_originals=False{advice}."


class InvalidCalibration(UserError):
    """A calibration is damaged, or belongs to another model."""

    template = (
        "the calibration {source!r} cannot be used: {reason}. Calibrate this model with speccompile.calibrate, or "
        "`speccompile calibrate`."
    )


class DeterministicUnavailable(SpecCompileError):
    """``deterministic=True`` does not hold; ``op`` is the first op whose bits differ."""

    template = (
        "deterministic=True is not available: {evidence}. First op whose result for a row depends on the row's index: "
        "{op}. Use deterministic=False, or a backend whose ops have a fixed order of reduction."
    )
