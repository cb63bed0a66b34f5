"""Captured graphs on disk: export takes longer than everything else in a warm start.

A stored graph is only a shortcut. What could change a capture is in its key, the capture check runs on it as on a new
one, and one that does not pass is captured again.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from speccompile.graph_capture.graph import StepGraph
from speccompile.graph_capture.serialize import from_json, to_json
from speccompile.graph_capture.state import Layout
from speccompile.graph_capture.support import ModelInfo
from speccompile.paths import cache_dir

PACKAGE = Path(__file__).parent


class CaptureStore:
    """The stored captures of one model at one layout."""

    def __init__(self, model: PreTrainedModel, info: ModelInfo, layout: Layout) -> None:
        self._model, self._info, self._layout = model, info, layout
        self.path = cache_dir() / "captures" / f"{_key(model, info, layout)}.json"

    def load(self) -> StepGraph | None:
        """The stored graph, or None when there is none or it is damaged."""
        if not self.path.exists():
            return None
        checksum, _, text = self.path.read_text().partition("\n")
        if checksum != _sha(text):
            return None
        return from_json(json.loads(text), self._model, self._layout, self._info.device)

    def save(self, graph: StepGraph) -> None:
        """Store ``graph``, whole or not at all."""
        text = json.dumps(to_json(graph))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
            file.write(f"{_sha(text)}\n{text}")
        os.replace(file.name, self.path)


def _key(model: PreTrainedModel, info: ModelInfo, layout: Layout) -> str:
    """Of everything that a capture depends on: code, configuration, module tree, sizes, versions."""
    parts = [torch.__version__, transformers.__version__, repr(info), str(model)]
    config = model.config.to_diff_dict()
    config.pop("_name_or_path", None)
    parts.append(json.dumps(config, sort_keys=True, default=str))
    parts.append(repr([(name, tuple(p.shape), p.dtype) for name, p in model.named_parameters(remove_duplicate=False)]))
    parts.append(repr([(name, tuple(b.shape), b.dtype) for name, b in model.named_buffers()]))
    parts.append(repr(layout))
    sources = {inspect.getsourcefile(type(module)) for module in model.modules()}
    sources |= {str(path) for path in PACKAGE.glob("*.py")}
    for source in sorted(source for source in sources if source is not None):
        parts.append(_sha(Path(source).read_text()))
    return _sha("\n".join(parts))[:32]


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
