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

TESTS = str(Path(__file__).parents[2])
FILES = sorted(Path(__file__).parent.glob("interpreted/check_*.py"))


def test_under_the_interpreter() -> None:
    # What pytest passes to its own workers does not concern this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "--noconftest", "-p", "no:cacheprovider", *map(str, FILES)],
        env=environment | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, [TESTS, *sys.path]))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert FILES and all(re.search(rf"{file.name}::.* PASSED", done.stdout) for file in FILES)
