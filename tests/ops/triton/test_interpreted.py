"""Every Triton kernel against its reference on a CPU: the files in ``interpreted/``, in processes of their own.

Kernels are interpreted if TRITON_INTERPRET was set when triton was imported, and compiled otherwise: one process
cannot do both.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = str(Path(__file__).parents[2])
FILES = sorted(Path(__file__).parent.glob("interpreted/check_*.py"))


# Two halves of about the same length: a process takes seconds before its first test.
@pytest.mark.parametrize("attention", [True, False], ids=["attention", "others"])
def test_under_the_interpreter(attention: bool) -> None:
    files = [file for file in FILES if (file.stem == "check_attention") == attention]
    # What pytest passes to its own workers does not concern this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "--noconftest", "-p", "no:cacheprovider", *map(str, files)],
        env=environment | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, [TESTS, *sys.path]))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert files and all(re.search(rf"{file.name}::.* PASSED", done.stdout) for file in files)


def test_nothing_needs_triton_before_a_kernel_runs() -> None:
    """It is an optional dependency, and slow to import."""
    program = (
        "import sys, speccompile.wrapping, speccompile.lowering.stage_ops; "
        "print('speccompile.ops.triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
