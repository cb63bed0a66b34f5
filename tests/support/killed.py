"""A child process that is killed while it runs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def killed(run: object, folder: Path, seconds: float) -> set[str]:
    """What a child reported before it was killed, so many seconds after its first word."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            run(folder, writes)  # type: ignore[operator]
        finally:
            os._exit(1)
    os.close(writes)
    first = os.read(reads, 1)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert first and os.WIFSIGNALED(status), "it ended by itself"
    with os.fdopen(reads) as pipe:
        # The last line may be cut off.
        return {line.strip() for line in pipe if line.endswith("\n")} - {""}
