"""Guides for requests: compiled once, off the engine's thread and those of other requests, within limits."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidGuide, QueueFull, SpecCompileError
from speccompile.guides import Guide
from speccompile.serve.guide_process import READY, GuideSource, run
from speccompile.serve.options import ServeOptions

_KEPT_GUIDES = 64
#: Guides that may wait for the one that is being compiled.
_MOST_WAITING = 16
_START_SECONDS = 120


class GuideCompiler:
    """Compiles one guide at a time, in a thread that waits for a separate process. Known guides wait for nothing.

    Args:
        options: the limits.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: ServeOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="speccompile-guides")
        self._waiting: set[Future[Guide]] = set()
        self._lock = threading.Lock()
        self._kept: OrderedDict[GuideSource, Guide] = OrderedDict()
        self._running: tuple[BaseProcess, Connection] | None = None

    def guide(self, source: GuideSource) -> Future[Guide]:
        """The guide of ``source``. A future that is cancelled before its turn is not compiled.

        The future raises :class:`InvalidGuide` if the guide cannot be followed or a limit ended its compilation, and
        :class:`SpecCompileError` if the tokenizer cannot have guides.

        Raises:
            QueueFull: too many guides wait.
        """
        guide = self._known(source)
        if guide is not None:
            known: Future[Guide] = Future()
            known.set_result(guide)
            return known
        with self._lock:
            if len(self._waiting) > _MOST_WAITING:
                raise QueueFull(count=1, waiting=len(self._waiting), limit=_MOST_WAITING)
            future = self._thread.submit(self._compile_once, source)
            self._waiting.add(future)
        future.add_done_callback(self._leave)
        return future

    def start(self) -> None:
        """Start the process, if it does not run yet."""
        self._thread.submit(self._connection).result()

    def close(self) -> None:
        """End the process, also in the middle of a compilation."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        running = self._running
        if running is not None:
            running[0].kill()
        self._thread.shutdown()
        self._stop()

    def _leave(self, future: Future[Guide]) -> None:
        with self._lock:
            self._waiting.discard(future)

    def _known(self, source: GuideSource) -> Guide | None:
        with self._lock:
            if source in self._kept:
                self._kept.move_to_end(source)
            return self._kept.get(source)

    def _compile_once(self, source: GuideSource) -> Guide:
        # An earlier one in the queue may have been the same.
        guide = self._known(source)
        if guide is None:
            guide = self._compile(source)
            with self._lock:
                self._kept[source] = guide
                if len(self._kept) > _KEPT_GUIDES:
                    self._kept.popitem(last=False)
        return guide

    def _compile(self, source: GuideSource) -> Guide:
        connection, seconds = self._connection(), self._options.max_guide_seconds
        connection.send_bytes(pickle.dumps(source))
        if not connection.poll(seconds):
            self._stop()
            raise InvalidGuide(what=source.text, reason=f"compiling it takes longer than {seconds} s; make it simpler")
        try:
            answer: Guide | SpecCompileError = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            # outlines-core ends its process where it finds no memory.
            self._stop()
            reason = f"compiling it needs more than {self._options.max_guide_megabytes} MiB; make it simpler"
            raise InvalidGuide(what=source.text, reason=reason) from None
        if isinstance(answer, SpecCompileError):
            raise answer
        return answer

    def _connection(self) -> Connection:
        if self._running is not None and self._running[0].is_alive():
            return self._running[1]
        self._stop()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        limits = (self._options.max_guide_states, self._options.max_guide_megabytes)
        process = context.Process(target=run, args=(theirs, self._tokenizer, *limits), daemon=True)
        process.start()
        theirs.close()
        self._running = process, ours
        if not ours.poll(_START_SECONDS) or ours.recv_bytes() != READY:
            self._stop()
            raise InvalidGuide(what="the process that compiles guides", reason="it does not start")
        return ours

    def _stop(self) -> None:
        if self._running is None:
            return
        process, connection = self._running
        self._running = None
        connection.close()
        process.kill()
        process.join()
