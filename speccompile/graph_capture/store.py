"""Captured graphs on disk. Export needs more time than all other parts of a warm start.

A stored graph is only a shortcut. Its key contains everything that could change a capture. The capture check also runs
on a stored graph, and if it fails, the model is captured again.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from speccompile.graph.layer_state import IndexShape, KVShape, RecurrentShape
from speccompile.graph.state import Layout
from speccompile.graph.step_graph import StepGraph
from speccompile.graph_capture.masks import ForeignMask, Mask
from speccompile.graph_capture.model_facts import own_code, scalar_settings
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.graph_capture.observe import Observation
from speccompile.graph_capture.serialize import from_json, to_json
from speccompile.utils.storage import Storage, digest

PACKAGE = Path(__file__).parents[1]
# Packages whose code decides the result of a capture.
PACKAGES = ("graph", "graph_capture", "ops", "utils")


@dataclass(frozen=True)
class StoredCapture:
    """A stored capture: the observation, and the graph for a layout.

    ``fits`` returns whether the sizes of a layout differ from the graph's example sizes B and T, which passes rely on.
    """

    observed: Observation
    graph: Callable[[Layout], StepGraph]
    fits: Callable[[Layout], bool]


class CaptureStore:
    """The stored capture of one model, with KV of the dtype ``kv`` (None is the model's own). It depends neither on
    ``max_len`` nor on ``max_batch``.

    No key can contain hooks, which are code. A model with hooks is captured in every wrap, and nothing is stored.
    """

    def __init__(
        self, model: PreTrainedModel, info: ModelInfo, storage: Storage, kv: torch.dtype | None = None
    ) -> None:
        self._model, self._info, self._storage = model, info, storage
        self._keyed = own_code(model) is None
        self.name = f"captures/{_key(model, info, kv)}.json"

    def load(self) -> StoredCapture | None:
        """Return the stored capture; None if it does not exist or is damaged."""
        stored = self._storage.read(self.name) if self._keyed else None
        if stored is None:
            return None
        data = json.loads(stored)
        sizes = set(data["graph"]["sizes"].values())
        return StoredCapture(
            _read_observation(data["observed"]),
            lambda layout: from_json(data["graph"], self._model, layout, self._info.device),
            lambda layout: sizes.isdisjoint(layout.sizes),
        )

    def save(self, graph: StepGraph, observed: Observation) -> None:
        """Store a captured graph and its observation, if the model has a key."""
        if self._keyed:
            self._storage.write(self.name, capture_file(graph, observed))


class HeadStore:
    """The stored capture of a draft head. It does not depend on any size of the arena."""

    def __init__(self, head: nn.Module, info: ModelInfo) -> None:
        self._head, self._info = head, info
        self.name = f"captures/{_head_key(head, info)}.json"

    def load(self, layout: Layout, storage: Storage) -> StepGraph | None:
        """Return the stored graph; None if it does not exist, is damaged, or has example sizes that are also sizes of
        the layout."""
        stored = storage.read(self.name)
        if stored is None:
            return None
        data = json.loads(stored)
        if not layout.sizes.isdisjoint(data["sizes"].values()):
            return None
        return from_json(data, self._head, layout, self._info.device)

    def save(self, graph: StepGraph, storage: Storage) -> None:
        """Store the captured graph of a head."""
        storage.write(self.name, json.dumps(to_json(graph)).encode())


def capture_file(graph: StepGraph, observed: Observation) -> bytes:
    """Return the file that :class:`CaptureStore` stores."""
    return json.dumps({"observed": _observation(observed), "graph": to_json(graph)}).encode()


def _observation(observed: Observation) -> dict[str, Any]:
    kv, cross = (
        {layer: (shape.key, shape.value, _name(shape.dtype)) for layer, shape in shapes.items()}
        for shapes in (observed.kv, observed.cross)
    )
    index = {layer: (shape.size, _name(shape.dtype)) for layer, shape in observed.index.items()}
    return {**asdict(observed), "kv": kv, "cross": cross, "index": index}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read_observation(data: dict[str, Any]) -> Observation:
    kv, cross = (
        {
            int(layer): KVShape(tuple(key), tuple(value), getattr(torch, dtype))
            for layer, (key, value, dtype) in data[name].items()
        }
        for name in ("kv", "cross")
    )
    recurrent = {
        name: RecurrentShape(**{**shape, "state": tuple(shape["state"])}) for name, shape in data["recurrent"].items()
    }
    index = {int(layer): IndexShape(size, getattr(torch, dtype)) for layer, (size, dtype) in data["index"].items()}
    masks = tuple(_read_mask(mask) for mask in data["masks"])
    shapes = {"kv": kv, "cross": cross, "recurrent": recurrent, "index": index}
    return Observation(**{**data, **shapes, "masks": masks})


def _read_mask(data: dict[str, Any]) -> Mask | ForeignMask:
    return ForeignMask(**data) if "name" in data else Mask(**data)


def config_text(model: PreTrainedModel) -> str:
    """Return the configuration without the path that it was loaded from."""
    config = model.config.to_diff_dict()
    config.pop("_name_or_path", None)
    return json.dumps(config, sort_keys=True, default=str)


def _key(model: PreTrainedModel, info: ModelInfo, kv: torch.dtype | None) -> str:
    """Return a key over everything that a capture depends on: code, configuration, module tree and settings, weights'
    shapes, versions."""
    parts = [*_parts(model, info), config_text(model), *scalar_settings(model), *_digests(_sources(model)), f"kv {kv}"]
    return digest("\n".join(parts))[:32]


def _head_key(head: nn.Module, info: ModelInfo) -> str:
    """Return the key of a head. A head's configuration is the content of its modules, and its code is this package and
    the files beside the modules' files."""
    every = vars(nn.Module())
    settings = [
        f"{name}.{key}={value!r}"
        for name, module in head.named_modules()
        for key, value in sorted(vars(module).items())
        if key not in every and not isinstance(value, torch.Tensor) and not _is_derived(module, key)
    ]
    beside = {path for source in _sources(head) for path in source.parent.glob("*.py")}
    code = _digests(beside | {*PACKAGE.rglob("*.py")})
    return digest("\n".join(["head", *_parts(head, info), *settings, *code]))[:32]


def _is_derived(module: nn.Module, name: str) -> bool:
    """Whether an attribute is a cached property. It depends on other attributes, and exists after its first read."""
    return isinstance(getattr(type(module), name, None), cached_property)


def _parts(module: nn.Module, info: ModelInfo) -> list[str]:
    # A tied parameter has the first of its names, too: a configuration may tie what a checkpoint has apart.
    first: dict[int, str] = {}
    parameters = [
        (name, first.setdefault(id(parameter), name), tuple(parameter.shape), parameter.dtype)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    ]
    buffers = [(name, tuple(b.shape), b.dtype) for name, b in module.named_buffers()]
    versions = [torch.__version__, transformers.__version__]
    return [*versions, repr(info), str(module), repr(parameters), repr(buffers)]


def _sources(module: nn.Module) -> set[Path]:
    """Return files with the code of the modules, without torch's own."""
    found = {inspect.getsourcefile(type(part)) for part in module.modules()}
    torchs = Path(torch.__file__).parent
    files = {Path(source) for source in found if source is not None}
    return {path for path in files if torchs not in path.parents} | {
        path for package in PACKAGES for path in (PACKAGE / package).glob("*.py")
    }


def _digests(paths: Iterable[Path]) -> list[str]:
    return [digest(path.read_bytes()) for path in sorted(paths)]
