"""Compiles guides for requests once, within limits, outside of the threads of the engine and of other requests."""

from __future__ import annotations

import contextlib
import copy
import logging
import multiprocessing
import pickle
import signal
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidGuide, QueueFull, SpecCompileError
from speccompile.errors.base import clipped
from speccompile.guides import Guide
from speccompile.serve import guide_process
from speccompile.serve.guide_process import READY, compile_guide
from speccompile.serve.guide_source import GuideSource
from speccompile.serve.options import ServeOptions

log = logging.getLogger("speccompile.serve")

_KEPT_GUIDES = 256
#: Longest sources of kept guides, in characters of all together.
_KEPT_CHARACTERS = 2**23
#: Largest number of kept guides whose automata are kept, too. Each may need hundreds of MiB.
_KEPT_AUTOMATA = 8
#: Largest number of guides that wait while another one is compiled.
_MOST_WAITING = 16
_START_SECONDS = 120
#: Longest wait for an answer, in limits of CPU time: the process may compete with others.
_WALL_TIME = 20
#: Explanation for Python's fork server, which imports the main script of the server into the process.
_NOT_STARTED = (
    "the process that compiles it does not start; a script that builds a server must do so under "
    '`if __name__ == "__main__":`'
)
#: Forks a process that has imported the package, which is fast and possible from any thread.
_CONTEXT = multiprocessing.get_context("forkserver")


class GuideCompiler:
    """Compiles one guide at a time: in a separate process that limits end, then in a thread of this process. A spare
    process is ready to replace the first one. Known failures and guides are returned at once. The automaton of a known
    guide that has not been used for a while is compiled again, in the thread.

    Args:
        options: the limits.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: ServeOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="speccompile-guides")
        self._waiting: set[Future[Guide]] = set()
        self._lock = threading.Lock()
        self._kept: OrderedDict[GuideSource, Guide | SpecCompileError] = OrderedDict()
        self._running: _Process | None = None
        # Replaces the process that a limit or a crash has ended. Then no request waits for a start.
        self._spare: _Process | None = None

    def guide(self, source: GuideSource) -> Future[Guide]:
        """Return the guide of ``source``. A future that is cancelled before its compilation begins is skipped.

        The future raises :class:`InvalidGuide` if the guide is not valid or a limit ended its compilation. It raises
        :class:`SpecCompileError` if the tokenizer does not support guides.

        Raises:
            QueueFull: too many guides wait, and this one is not known.
        """
        found = self._known(source)
        if isinstance(found, SpecCompileError) or (found is not None and found.is_compiled):
            known: Future[Guide] = Future()
            if isinstance(found, Guide):
                known.set_result(found)
            else:
                known.set_exception(copy.copy(found))
            return known
        with self._lock:
            # A known guide is only compiled in the thread.
            if found is None and len(self._waiting) > _MOST_WAITING:
                raise QueueFull(count=1, waiting=len(self._waiting), limit=_MOST_WAITING)
            future = self._thread.submit(self._compile_once, source)
            self._waiting.add(future)
        future.add_done_callback(self._leave)
        return future

    def start(self) -> None:
        """Start the process, unless it runs."""
        self._thread.submit(self._ready_process).result()

    def close(self) -> None:
        """End the process, even during a compilation."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        for process in (self._running, self._spare):
            if process is not None:
                process.process.kill()
        self._thread.shutdown()
        for process in (self._running, self._spare):
            if process is not None:
                process.stop()

    def _leave(self, future: Future[Guide]) -> None:
        with self._lock:
            self._waiting.discard(future)

    def _known(self, source: GuideSource) -> Guide | SpecCompileError | None:
        with self._lock:
            if source in self._kept:
                self._kept.move_to_end(source)
            return self._kept.get(source)

    def _compile_once(self, source: GuideSource) -> Guide:
        # An earlier source in the queue may have been equal.
        found = self._known(source) or self._compile(source, self._ready_process())
        if isinstance(found, Guide) and not found.is_compiled:
            found.matcher().compute_bitmask()
        with self._lock:
            self._kept[source] = found
            self._forget()
        if isinstance(found, SpecCompileError):
            # An exception that is raised keeps the frames of those that raised it.
            raise copy.copy(found)
        return found

    def _forget(self) -> None:
        """Forget what has not been used for the longest time."""
        characters = sum(len(source.text) for source in self._kept)
        while len(self._kept) > 1 and (len(self._kept) > _KEPT_GUIDES or characters > _KEPT_CHARACTERS):
            source, _ = self._kept.popitem(last=False)
            characters -= len(source.text)
        guides = [found for found in self._kept.values() if isinstance(found, Guide)]
        for guide in guides[:-_KEPT_AUTOMATA]:
            guide.release()

    def _compile(self, source: GuideSource, process: _Process) -> Guide | SpecCompileError:
        """Return the guide, or the error that the source has each time.

        Raises:
            InvalidGuide: the process has ended, and may compile the source another time.
        """
        seconds = self._options.max_guide_seconds
        try:
            process.connection.send_bytes(pickle.dumps(source))
            if not process.connection.poll(_WALL_TIME * seconds):
                raise EOFError
            error: SpecCompileError | None = pickle.loads(process.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self._replace()
            limits = f"{seconds} s of CPU time or {self._options.max_guide_megabytes} MiB"
            ended = InvalidGuide(what=source.text, reason=f"compiling it needs more than {limits}; simplify it")
            if process.process.exitcode == -signal.SIGPROF:
                return ended
            raise ended from None
        if error is not None:
            return error
        # A compiled guide cannot be sent between processes. The limits held there.
        guide = compile_guide(source, self._tokenizer)
        for part in guide.loosened:
            log.warning("%s: not followed, since the tool is not strict", clipped(part))
        return guide

    def _ready_process(self) -> _Process:
        """Return the running process. Starts it, and the spare one, if necessary."""
        if self._running is None or not self._running.process.is_alive():
            self._replace()
        assert self._running is not None
        self._running.wait_until_ready()
        return self._running

    def _replace(self) -> None:
        """Stop the process, and continue with the spare one. A new spare one is started."""
        if self._running is not None:
            self._running.stop()
        spare = self._spare
        self._running = spare if spare is not None and spare.process.is_alive() else self._start()
        self._spare = self._start()

    def _start(self) -> _Process:
        limits = (self._options.max_guide_seconds, self._options.max_guide_megabytes)
        return _Process(self._tokenizer, *limits)


class _Process:
    """Process that compiles guides. It may not be ready yet.

    Args:
        limits: further arguments of ``guide_process.run``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *limits: int) -> None:
        _CONTEXT.set_forkserver_preload([guide_process.__name__])
        self.connection, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=guide_process.run, args=(theirs, tokenizer, *limits), daemon=True)
        self.process.start()
        theirs.close()
        self._is_ready = False

    def wait_until_ready(self) -> None:
        """Wait for the process. Raises InvalidGuide if it does not start."""
        if self._is_ready:
            return
        with contextlib.suppress(EOFError, ConnectionError):
            self._is_ready = self.connection.poll(_START_SECONDS) and self.connection.recv_bytes() == READY
        if not self._is_ready:
            self.stop()
            raise InvalidGuide(what="schemas and patterns", reason=_NOT_STARTED)

    def stop(self) -> None:
        """End the process, even during a compilation."""
        self.connection.close()
        self.process.kill()
        self.process.join()
