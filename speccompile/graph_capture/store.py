"""Captured graphs on disk: export takes longer than everything else in a warm start.

A stored graph is only a shortcut. What could change a capture is in its key, the capture check runs on it as on a new
one, and one that does not pass is captured again.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from speccompile.graph_capture.graph import StepGraph
from speccompile.graph_capture.masks import ForeignMask, Mask
from speccompile.graph_capture.observe import Observation
from speccompile.graph_capture.serialize import from_json, to_json
from speccompile.graph_capture.state import KVShape, Layout
from speccompile.graph_capture.support import ModelInfo
from speccompile.storage import Storage, digest

PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class StoredCapture:
    """A capture as it was stored: what was observed, and the graph for a layout.

    ``fits`` tells whether a layout keeps clear of the graph's example sizes B and T, which passes go by.
    """

    observed: Observation
    graph: Callable[[Layout], StepGraph]
    fits: Callable[[Layout], bool]


class CaptureStore:
    """The stored capture of one model. It depends on no ``max_len`` and no ``max_batch``."""

    def __init__(self, model: PreTrainedModel, info: ModelInfo, storage: Storage) -> None:
        self._model, self._info, self._storage = model, info, storage
        self.name = f"captures/{_key(model, info)}.json"

    def load(self) -> StoredCapture | None:
        """What is stored, or None when there is nothing or it is damaged."""
        stored = self._storage.read(self.name)
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
        self._storage.write(self.name, capture_file(graph, observed))


def capture_file(graph: StepGraph, observed: Observation) -> bytes:
    """What :class:`CaptureStore` stores."""
    return json.dumps({"observed": _observation(observed), "graph": to_json(graph)}).encode()


def _observation(observed: Observation) -> dict[str, Any]:
    kv = {
        layer: (shape.key, shape.value, str(shape.dtype).removeprefix("torch.")) for layer, shape in observed.kv.items()
    }
    return {**asdict(observed), "kv": kv}


def _read_observation(data: dict[str, Any]) -> Observation:
    kv = {
        int(layer): KVShape(tuple(key), tuple(value), getattr(torch, dtype))
        for layer, (key, value, dtype) in data["kv"].items()
    }
    return Observation(**{**data, "kv": kv, "masks": tuple(_read_mask(mask) for mask in data["masks"])})


def _read_mask(data: dict[str, Any]) -> Mask | ForeignMask:
    return ForeignMask(**data) if "name" in data else Mask(**data)


def config_text(model: PreTrainedModel) -> str:
    """The configuration, but where it was loaded from."""
    config = model.config.to_diff_dict()
    config.pop("_name_or_path", None)
    return json.dumps(config, sort_keys=True, default=str)


def _key(model: PreTrainedModel, info: ModelInfo) -> str:
    """Of everything that a capture depends on: code, configuration, module tree, weights' shapes, versions."""
    parts = [torch.__version__, transformers.__version__, repr(info), str(model)]
    parts.append(config_text(model))
    parts.append(repr([(name, tuple(p.shape), p.dtype) for name, p in model.named_parameters(remove_duplicate=False)]))
    parts.append(repr([(name, tuple(b.shape), b.dtype) for name, b in model.named_buffers()]))
    sources = {inspect.getsourcefile(type(module)) for module in model.modules()}
    sources |= {str(path) for path in PACKAGE.glob("*.py")}
    for source in sorted(source for source in sources if source is not None):
        parts.append(digest(Path(source).read_text()))
    return digest("\n".join(parts))[:32]
