"""What a forked child does, as its parent sees it."""

from __future__ import annotations

import faulthandler
import os
import select
from collections.abc import Callable
from typing import Any

#: Seconds; a child that hangs ends itself.
PATIENCE = 60


def in_child(function: Callable[[], Any]) -> str:
    """``repr(function())`` in a forked process, or the type and text of what it raised."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        try:
            said = repr(function())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writes, said.encode())
        os._exit(0)
    os.close(writes)
    assert select.select([reads], [], [], 2 * PATIENCE)[0], "the child says nothing"
    said = os.read(reads, 2**16).decode()
    os.close(reads)
    assert os.waitpid(child, 0)[1] == 0, "the child hung"
    return said
