"""Compiled bodies as files: their names in the cache folder, their bytes, and their loading."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, cast

import torch

from speccompile.errors import LoweringError, error_line
from speccompile.graph.body import Body
from speccompile.lowering.inductor import folder_advice
from speccompile.utils.inductor_folder import (
    write_error,
)
from speccompile.utils.machine import machine
from speccompile.utils.sources import sources
from speccompile.utils.storage import digest
from speccompile.utils.torch_private import (
    CompiledArtifact,
)

ARTIFACTS = "compiled"

# Packages whose code decides how a body is compiled. The body itself is also in its key.
PACKAGES = ("graph", "lowering", "ops", "utils")


def artifact_name(body: Body, device: torch.device) -> str:
    parts = [
        sources(*PACKAGES),
        torch.__version__,
        str(torch.version.git_version),
        repr(machine(device)),
        body.module.code,
    ]
    parts += [repr(body.dims), repr(body.dtypes), repr(device)]
    return f"{ARTIFACTS}/{digest(chr(10).join(parts))[:32]}.bin"


def is_saveable(artifact: CompiledArtifact) -> bool:
    # All artifacts that standalone_compile returns here have this method, though their base class does not declare it.
    saveable: bool = cast(Any, artifact).is_saveable()
    return saveable


def artifact_file(artifact: CompiledArtifact, body: Body) -> bytes:
    if not is_saveable(artifact):
        raise LoweringError(
            f"Inductor has nothing of {body.name!r} that can be saved, since its caches are off: unset "
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES, TORCHINDUCTOR_FX_GRAPH_CACHE and TORCHINDUCTOR_AUTOGRAD_CACHE",
            unsaved=body.name,
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "artifact")
        artifact.save(path=str(path), format="binary")
        return path.read_bytes()


def read_artifact(name: str, data: bytes) -> CompiledArtifact:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "artifact")
        path.write_bytes(data)
        try:
            return CompiledArtifact.load(path=str(path), format="binary")
        except Exception as error:
            advice = f"Delete {name} in the cache folder, or wrap the model instead of loading a package"
            if write_error(error):
                advice = folder_advice()
            raise LoweringError(
                f"Inductor could not load code that was compiled before ({error_line(error)}). {advice}",
                file=name,
                reason=error_line(error),
            ) from error
