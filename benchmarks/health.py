"""Seconds that a server takes to answer ``/health``, asked ten times a second in a separate process.

``python -m benchmarks.health http://127.0.0.1:8000`` prints one JSON line for each answer until its input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

EVERY, PATIENCE = 0.1, 10.0
_REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True)
class Probe:
    """One question.

    Args:
        asked: seconds of the system's monotonic clock.
        late: seconds that this process was late with the question, because it had no core.
        seconds: until the answer, or :data:`PATIENCE` without one.
        status: 0 without an answer.
    """

    asked: float
    late: float
    seconds: float
    status: int


async def ask(host: str, port: int, due: float) -> Probe:
    """Ask once over a new connection."""
    asked, status = time.monotonic(), 0
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(_REQUEST)
                line = await reader.readline()
                status = int(line.split()[1]) if line else 0
            finally:
                writer.close()
    return Probe(asked, asked - due, time.monotonic() - asked if status else PATIENCE, status)


async def ask_again_and_again(host: str, port: int) -> None:
    """Print the answers until the input ends. A question does not wait for the answer to the one before."""
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    asking: set[asyncio.Task[Probe]] = set()
    due = time.monotonic()
    while not ended.done():
        task = asyncio.create_task(ask(host, port, due))
        asking.add(task)
        task.add_done_callback(lambda done: print(json.dumps(vars(done.result())), flush=True))
        task.add_done_callback(asking.discard)
        due += EVERY
        await asyncio.sleep(due - time.monotonic())
    await asyncio.gather(*asking)


@contextlib.contextmanager
def probed(host: str, port: int) -> Iterator[list[Probe]]:
    """The answers, complete after the block."""
    command = [sys.executable, "-m", "benchmarks.health", f"http://{host}:{port}"]
    probes: list[Probe] = []
    # A pipe would be full after some minutes.
    with tempfile.TemporaryFile("w+") as file:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file) as process:
            try:
                yield probes
            finally:
                process.communicate()
        file.seek(0)
        probes += [Probe(**json.loads(line)) for line in file]


if __name__ == "__main__":
    asked_host, _, asked_port = sys.argv[1].removeprefix("http://").partition(":")
    asyncio.run(ask_again_and_again(asked_host, int(asked_port)))
