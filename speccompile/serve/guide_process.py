"""Compiles guides in a separate process, since a thread cannot have a limit of time or of memory."""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import resource
import signal
from multiprocessing.connection import Connection

from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidGuide, SpecCompileError, error_line
from speccompile.guides import (
    Guide,
    choice_guide,
    grammar_guide,
    json_schema_guide,
    regex_guide,
    structural_tag_guide,
)
from speccompile.guides.guide import compiled
from speccompile.guides.tokens import guide_tokens
from speccompile.serve.guide_source import GuideSource
from speccompile.serve.tool_grammar import ToolGrammar

log = logging.getLogger("speccompile.serve")

#: First message of the process, sent when it has started.
READY = b"ready"


def compile_guide(source: GuideSource, tokenizer: PreTrainedTokenizerBase) -> Guide:
    """Compile a guide.

    Raises:
        InvalidGuide: the source is not valid.
    """
    if source.kind == "json_schema":
        return json_schema_guide(source.text, tokenizer)
    if source.kind == "regex":
        return regex_guide(source.text, tokenizer)
    if source.kind == "choice":
        return choice_guide(json.loads(source.text), tokenizer)
    if source.kind == "grammar":
        return grammar_guide(source.text, tokenizer)
    if source.kind == "structural_tag":
        given = json.loads(source.text)
        return structural_tag_guide(given["structures"], given["triggers"], tokenizer)
    lark, loosened = ToolGrammar.of_text(source.text).lark()
    return compiled("the grammar of the tools", lark, guide_tokens(tokenizer), loosened)


def run(connection: Connection, tokenizer: PreTrainedTokenizerBase, seconds: int, megabytes: int) -> None:
    """Compile received sources until the connection is closed. This is the main function of the process.

    An answer is the error, or None: a compiled guide cannot be sent. A source that exceeds a limit ends the process.

    Args:
        seconds: most CPU time for one source.
        megabytes: most memory for one source, beyond that of the process before it.
    """
    # Ctrl-C reaches all processes of a terminal. Only the server may end this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Build the data that all guides of a tokenizer share. If that fails, each request receives the error.
    with contextlib.suppress(SpecCompileError):
        compile_guide(GuideSource("regex", "a"), tokenizer)
    connection.send_bytes(READY)
    while True:
        try:
            source: GuideSource = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        # SIGPROF ends a process that does not handle it.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        _limit_memory(megabytes)
        answer: SpecCompileError | None = None
        try:
            compile_guide(source, tokenizer)
        except SpecCompileError as error:
            answer = error
        except (MemoryError, RecursionError) as error:
            answer = InvalidGuide(
                what=source.text, reason=f"compiling it needs too much memory ({type(error).__name__})"
            )
        except Exception as error:
            # The process survives any error: a new one would delay the next guide.
            log.exception("a guide could not be compiled")
            answer = InvalidGuide(what=source.text, reason=f"it cannot be compiled ({error_line(error)})")
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(pickle.dumps(answer))


def _limit_memory(megabytes: int) -> None:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + megabytes * 2**20
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
