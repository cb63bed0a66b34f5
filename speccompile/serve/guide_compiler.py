"""Guides for requests: compiled once, off the engine's thread, within limits."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections import OrderedDict
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidGuide, SpecCompileError
from speccompile.guides import Guide
from speccompile.serve.guide_process import READY, GuideSource, run
from speccompile.serve.options import ServeOptions

_KEPT_GUIDES = 64
_START_SECONDS = 120


class GuideCompiler:
    """Any thread may use it; guides are compiled one at a time.

    Args:
        options: the limits.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: ServeOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._lock = threading.Lock()
        self._kept: OrderedDict[GuideSource, Guide] = OrderedDict()
        self._running: tuple[BaseProcess, Connection] | None = None

    def guide(self, source: GuideSource) -> Guide:
        """The guide of ``source``. Takes up to the limit of seconds; the first call also starts the process.

        Raises:
            InvalidGuide: it cannot be followed, or a limit ended its compilation.
            SpecCompileError: the tokenizer cannot have guides.
        """
        with self._lock:
            if source in self._kept:
                self._kept.move_to_end(source)
                return self._kept[source]
            guide = self._compile(source)
            self._kept[source] = guide
            if len(self._kept) > _KEPT_GUIDES:
                self._kept.popitem(last=False)
            return guide

    def start(self) -> None:
        """Start the process, if it does not run yet."""
        with self._lock:
            self._connection()

    def close(self) -> None:
        with self._lock:
            self._stop()

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
