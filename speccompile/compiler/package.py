"""A wrapped model as one file, which :meth:`Speculator.save` writes and :func:`speccompile.load` reads.

A zip file with a manifest (JSON: versions, model, machine, options, a SHA-256 of every other file), the captured graph
(JSON), the finished steps as printed Python, Inductor's artifacts of the bodies and their machine code. No weights.

A package is a program: steps run as Python, Inductor's artifacts are pickles with Python and C++ inside, and machine
code is put into Inductor's cache folder. Load a package only from a source whose programs you would run: its hashes
detect damage, not malice. All other parts have a safe form: manifest and graph are JSON, constants are read with
``weights_only=True``.
"""

from __future__ import annotations

import errno
import json
import os
import zipfile
import zlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from speccompile.acceptance import RULES, Rule
from speccompile.adapters.options import Adapters
from speccompile.calibration.calibration import Calibration
from speccompile.compiler.options import WrapOptions
from speccompile.errors import CannotSave, CorruptPackage, ForeignPackage
from speccompile.graph.tree import Tree
from speccompile.graph_capture.model_facts import own_code
from speccompile.graph_capture.model_info import inspect_model, named_tensors
from speccompile.graph_capture.store import CaptureStore, config_text
from speccompile.hidden_states.options import SaveHiddenStates
from speccompile.lowering.artifacts import ARTIFACTS
from speccompile.ops.cpu.free_originals import originals_freed
from speccompile.policies import Cost, Ema, Fixed, Gate, Schedule, ScheduleUpTo
from speccompile.sampling.pipeline import registered_processors
from speccompile.utils.machine import machine
from speccompile.utils.sources import sources
from speccompile.utils.storage import CacheFolder, digest
from speccompile.utils.weight_forms import QuantizedForms

FORMAT = 1
MANIFEST = "manifest.json"
SAVE_AGAIN = "Wrap the model here and save that"


@dataclass(frozen=True)
class Package:
    """The complete contents of a package.

    Args:
        manifest: see :func:`make_manifest`.
        files: all other files, by name.
    """

    manifest: Mapping[str, Any]
    files: Mapping[str, bytes]


# --- writing -------------------------------------------------------------------------------------


def check_savable(path: Path, model: PreTrainedModel, options: WrapOptions) -> None:
    """Check that a package can be written, before anything is compiled for it.

    Raises:
        CannotSave: the model, or an option of ``wrap``, cannot be saved.
        OSError: ``path`` cannot be written.
    """
    if isinstance(options.weights, QuantizedForms):
        reason = "a package holds no weights, and those of a quantised checkpoint are given to wrap"
        raise CannotSave(name="weights", reason=reason)
    if originals_freed(model):
        raise CannotSave(
            name="free_originals", reason="a package is matched with the model's own weights, which are gone"
        )
    if code := own_code(model):
        raise CannotSave(name="the model", reason=f"it has {code}, which is your code")
    for name, value in options.arguments().items():
        _json_value(name, value)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a package is a file, and this is a folder", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the folder of the package does not exist", str(path))
    partial = _partial(path)
    partial.touch()
    partial.unlink()


def make_manifest(
    model: PreTrainedModel, options: WrapOptions, state: Collection[str], files: Mapping[str, bytes]
) -> dict[str, Any]:
    """Everything that must match when a package is loaded, and a list of its contents.

    Args:
        options: plain values, as :func:`check_savable` accepts them.
        state: names of the state tensors.
    """
    return {
        "format": FORMAT,
        "versions": _versions(),
        "model": _model(model),
        "machine": machine(model.device) if any(name.startswith(f"{ARTIFACTS}/") for name in files) else {},
        "options": {name: _json_value(name, value) for name, value in options.arguments().items()},
        "processors": [item.name for item in registered_processors(state)],
        "files": {name: digest(data) for name, data in files.items()},
    }


def write_package(path: Path, manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    """Write the whole package, or leave the file at ``path`` as it was."""
    partial = _partial(path)
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(MANIFEST, json.dumps(manifest, indent=1))
            for name, data in files.items():
                archive.writestr(name, data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _json_value(name: str, value: Any) -> Any:
    if isinstance(value, Rule):
        if RULES.get(value.name) is not type(value):
            raise CannotSave(name=name, reason=f"the rule {type(value).__qualname__} is not one of this package's")
        fields = {key: _json_value(f"{name}.{key}", item) for key, item in asdict(value).items()}
        return {"rule": value.name, "options": fields}
    if isinstance(value, Fixed) and isinstance(value.draft_len, Tree):
        return {"fixed": value.draft_len.fields}
    if isinstance(value, Schedule | ScheduleUpTo) and any(isinstance(shape, Tree) for _, shape in value.steps):
        raise CannotSave(name=name, reason="a schedule with trees has no text form")
    if isinstance(value, Fixed | Schedule | ScheduleUpTo | Cost | Ema | Gate):
        return str(value)
    if isinstance(value, list | tuple):
        return [_json_value(name, item) for item in value]
    if isinstance(value, Adapters):
        return {"adapters": {key: _json_value(f"{name}.{key}", item) for key, item in value.fields.items()}}
    if isinstance(value, Mapping):
        return {"mapping": {key: _json_value(f"{name}[{key!r}]", item) for key, item in value.items()}}
    if isinstance(value, Calibration):
        raise CannotSave(name=name, reason="a package holds nothing about weights; give the file of a calibration")
    if isinstance(value, SaveHiddenStates):
        raise CannotSave(name=name, reason="its folder exists only on this machine")
    if isinstance(value, Tree):
        return {"tree": value.fields}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, torch.nn.Module):
        reason = f"a package holds no weights, and a {type(value).__qualname__} has weights"
        raise CannotSave(name=name, reason=f"{reason}; give a draft model or head as its folder or hub id")
    raise CannotSave(name=name, reason=f"{type(value).__qualname__} objects are your code, which it cannot hold")


# --- reading -------------------------------------------------------------------------------------


def read_package(path: Path) -> Package:
    """Read and verify a package.

    Raises:
        CorruptPackage: a file is missing, differs from the written one, or is not in the manifest.
    """

    def refuse(what: str) -> CorruptPackage:
        return CorruptPackage(path=str(path), what=what)

    if not path.is_file():
        raise refuse("there is no such file")
    try:
        with zipfile.ZipFile(path) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError) as error:
        raise refuse(f"it cannot be unpacked ({error})") from error
    try:
        manifest = json.loads(files.pop(MANIFEST))
        listed = manifest["files"]
    except (KeyError, TypeError, ValueError) as error:
        raise refuse(f"its {MANIFEST} is missing or cannot be read ({error!r})") from error
    if manifest.get("format") != FORMAT:
        raise refuse(f"its format is {manifest.get('format')!r}, and this version reads {FORMAT}")
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
        raise refuse("the path of one of its files leads outside of its folder")
    if missing := sorted(listed.keys() - files.keys()):
        raise refuse(f"{', '.join(missing)} is missing")
    if added := sorted(files.keys() - listed.keys()):
        raise refuse(f"{', '.join(added)} is not in its manifest")
    for name, data in files.items():
        if digest(data) != listed[name]:
            raise refuse(f"{name} is not what was written (its SHA-256 differs)")
    return Package(manifest, files)


def check_fits(package: Package, path: Path, model: PreTrainedModel) -> None:
    """Check that a package was written for such a model, by these versions, and, if it has compiled code, on such a
    machine.

    Raises:
        ForeignPackage: with the first difference.
        UserError: ``wrap`` does not accept the model.
    """

    def compare(theirs: Mapping[str, Any], ours: Mapping[str, Any], advice: str) -> None:
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            there, here = theirs.get(name), ours.get(name)
            if there != here:
                raise ForeignPackage(path=str(path), what=name, theirs=there, ours=here, advice=advice)

    manifest = package.manifest
    compare(manifest["versions"], _versions(), f"{SAVE_AGAIN}, or install those versions")
    theirs, ours = manifest["model"], json.loads(json.dumps(_model(model)))
    compare({"model class": theirs["class"]}, {"model class": ours["class"]}, "Load the model that was wrapped")
    compare(theirs["weights"], ours["weights"], "Load the model that was wrapped (other values are fine)")
    compare({"configuration": theirs["config"]}, {"configuration": ours["config"]}, "Load the model that was wrapped")
    code = "the model's code and modules (a digest)"
    compare({code: theirs["capture"]}, {code: ours["capture"]}, "Load the model that was wrapped")
    compare({"device": theirs["device"]}, {"device": ours["device"]}, "Move the model there with model.to(...)")
    known = [item.name for item in registered_processors()]
    advice = "Register the same ones with speccompile.sampling.register_processor"
    compare({"registered processors": manifest["processors"]}, {"registered processors": known}, advice)
    if manifest["machine"]:
        compare(manifest["machine"], machine(model.device), f"{SAVE_AGAIN}, or set it as on the other machine")


def read_wrap_options(manifest: Mapping[str, Any]) -> WrapOptions:
    """The options of the wrap that was saved."""
    return WrapOptions.of({name: _read_option(value) for name, value in manifest["options"].items()})


def _read_option(value: Any) -> Any:
    if isinstance(value, dict) and "tree" in value:
        return Tree.of(value["tree"])
    if isinstance(value, dict) and "fixed" in value:
        return Fixed(Tree.of(value["fixed"]))
    if isinstance(value, dict) and "adapters" in value:
        return Adapters(**{name: _read_option(item) for name, item in value["adapters"].items()})
    if isinstance(value, dict) and "mapping" in value:
        return {key: _read_option(item) for key, item in value["mapping"].items()}
    if isinstance(value, dict):
        return RULES[value["rule"]](**{name: _read_option(item) for name, item in value["options"].items()})
    return tuple(_read_option(item) for item in value) if isinstance(value, list) else value


def _versions() -> dict[str, str]:
    return {
        "torch": f"{torch.__version__} ({torch.version.git_version})",
        "transformers": transformers.__version__,
        "speccompile's sources": sources()[:16],
    }


def _model(model: PreTrainedModel) -> dict[str, Any]:
    weights = {
        name: f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        for name, tensor in named_tensors(model).items()
    }
    kind = type(model)
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "config": digest(config_text(model))[:16],
        "capture": CaptureStore(model, inspect_model(model), CacheFolder()).name,
        "device": str(model.device),
        "weights": weights,
    }
