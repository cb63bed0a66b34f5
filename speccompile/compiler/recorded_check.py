"""Results of capture checks of packed folders, on disk.

A check compares a graph with the model's own forward over the same weights. Those of a packed folder have a hash, and
with the same weights, code, compiler and machine the result is the same: it is computed once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from transformers import PreTrainedModel

from speccompile.compiler.config import BuildConfig
from speccompile.compiler.frontend import BuiltStages
from speccompile.graph_capture.model_facts import own_code
from speccompile.graph_capture.replaced_code import replaced_code
from speccompile.lowering.backends import BACKENDS
from speccompile.ops.cpu.library import build_key
from speccompile.utils.machine import machine
from speccompile.utils.storage import Storage, digest


@dataclass(frozen=True)
class RecordedCheck:
    """The stored result of one check.

    Args:
        name: of the file, a hash of everything that the result depends on; None if that has no hash.
    """

    name: str | None
    storage: Storage

    @staticmethod
    def of(model: PreTrainedModel, config: BuildConfig, built: BuiltStages, storage: Storage) -> RecordedCheck:
        """The result for the weights of ``model``. It has no name unless all of them are those of a packed folder, and
        not with code whose changes no hash shows: hooks, functions that replace those of the model's files, passes and
        backends of the user, and adapters."""
        folder = "" if config.quantized is None else config.quantized.folder
        known = type(config.backend) in BACKENDS.values() and not config.passes and config.adapters is None
        if not folder or not known or own_code(model) is not None or replaced_code(model) is not None:
            return RecordedCheck(None, storage)
        machines = [json.dumps(machine(model.device), sort_keys=True), *map(build_key, ("base", "rounded"))]
        parts = [folder, built.maker.model_key, config.backend.name, *machines]
        return RecordedCheck(f"checks/{digest(chr(10).join(parts))[:32]}.json", storage)

    def read(self) -> float | None:
        """Return the largest difference of logits; None if the check has not passed yet."""
        data = None if self.name is None else self.storage.read(self.name)
        return None if data is None else float(json.loads(data)["difference"])

    def write(self, difference: float) -> None:
        """Store that the check has passed."""
        if self.name is not None:
            self.storage.write(self.name, json.dumps({"difference": difference}).encode())
