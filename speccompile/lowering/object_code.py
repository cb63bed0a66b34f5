"""Machine code of compiled bodies. Inductor keeps it apart from their artifacts, in its own cache folder.

Inductor does not report which files of that folder belong to an artifact. Another process therefore loads the artifacts
with an empty folder. The files that it creates there are those that the artifacts need: their kernels, and the programs
with which Inductor probes this CPU and compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from speccompile.errors import LoweringError
from speccompile.utils.inductor_folder import make_inductor_folder_writable
from speccompile.utils.torch_private import inductor_cache_dir

FOLDER = "machine_code"

LOAD = """
import sys
import speccompile.ops
from speccompile.utils.torch_private import CompiledArtifact

for path in sys.argv[1:]:
    CompiledArtifact.load(path=path, format="binary")
"""


def machine_code(artifacts: Sequence[bytes]) -> dict[str, bytes]:
    """Return shared libraries by ``machine_code/`` and their paths in Inductor's cache folder. This compiles them once
    more.

    Raises:
        LoweringError: the other process failed; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, str(index)) for index, _ in enumerate(artifacts)]
        for path, data in zip(paths, artifacts, strict=True):
            path.write_bytes(data)
        cache = Path(folder, "cache")
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", LOAD, *map(str, paths)]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise LoweringError(
                f"Inductor could not compile for the package: {' '.join(done.stderr.splitlines()[-3:])}"
            )
        found = sorted(cache.rglob("*.so"))
        return {f"{FOLDER}/{path.relative_to(cache).as_posix()}": path.read_bytes() for path in found}


def install_machine_code(files: Mapping[str, bytes]) -> None:
    """Copy the files that :func:`machine_code` returned to Inductor's cache folder, which names files by their sources.
    Other ``files`` of a package, and files that the folder already has, are skipped."""
    make_inductor_folder_writable()
    for name, data in files.items():
        folder, _, rest = name.partition("/")
        path = Path(inductor_cache_dir(), rest)
        if folder != FOLDER or path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        os.chmod(file.name, 0o755)
        os.replace(file.name, path)
