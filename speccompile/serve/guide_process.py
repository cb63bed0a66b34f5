"""Compiles guides in a separate process, since a thread cannot have a limit of time or of memory."""

from __future__ import annotations

import contextlib
import logging
import pickle
import resource
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidGuide, SpecCompileError, error_line
from speccompile.guides import Guide, json_schema_guide, regex_guide
from speccompile.serve.tool_grammar import ToolGrammar

log = logging.getLogger("speccompile.serve")

#: First message of the process, sent when it has started.
READY = b"ready"


@dataclass(frozen=True)
class GuideSource:
    """Source of a guide: a JSON schema as JSON text, a regular expression, or a :class:`ToolGrammar` as text."""

    kind: Literal["json_schema", "regex", "tools"]
    text: str


def compile_guide(source: GuideSource, tokenizer: PreTrainedTokenizerBase, max_states: int) -> Guide:
    """Compile a guide.

    Raises:
        InvalidGuide: the source is not valid, or the guide has more than ``max_states`` states.
    """
    if source.kind == "json_schema":
        guide = json_schema_guide(source.text, tokenizer)
    else:
        pattern = ToolGrammar.of_text(source.text).regex() if source.kind == "tools" else source.text
        guide = regex_guide(pattern, tokenizer)
    if guide.states > max_states:
        reason = f"its automaton has {guide.states} states, and the server allows {max_states}; simplify it"
        raise InvalidGuide(what=source.text, reason=reason)
    return guide


def run(connection: Connection, tokenizer: PreTrainedTokenizerBase, max_states: int, megabytes: int) -> None:
    """Compile received sources until the connection is closed. This is the main function of the process.

    Args:
        megabytes: largest memory beyond that at the start.
    """
    # Ctrl-C reaches all processes of a terminal. Only the server may end this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Build the data that all guides of a tokenizer share. If that fails, each request receives the error.
    with contextlib.suppress(SpecCompileError):
        compile_guide(GuideSource("regex", "a"), tokenizer, max_states)
    _limit_memory(megabytes)
    connection.send_bytes(READY)
    while True:
        try:
            source: GuideSource = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        answer: Guide | SpecCompileError
        try:
            answer = compile_guide(source, tokenizer, max_states)
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
        connection.send_bytes(pickle.dumps(answer))


def _limit_memory(megabytes: int) -> None:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
