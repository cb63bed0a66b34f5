"""Every Triton kernel against its reference on a CPU: the files in ``interpreted/``, each in a process of its own.

Kernels are interpreted if TRITON_INTERPRET was set when triton was imported, and compiled otherwise: one process
cannot do both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = str(Path(__file__).parents[1])
FILES = sorted(Path(__file__).parent.glob("interpreted/check_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_under_the_interpreter(file: Path) -> None:
    # What pytest tells its own workers does not concern this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", str(file)],
        env=environment | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, [TESTS, *sys.path]))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_nothing_needs_triton_before_a_kernel_runs() -> None:
    """It is an optional dependency, and slow to import."""
    program = (
        "import sys, speccompile.wrap, speccompile.lowering.ops; print('speccompile.lowering.triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
