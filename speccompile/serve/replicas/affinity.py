"""Which replica a request prefers: that of the conversation's first turn, which knows its KV."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from speccompile.serve.replicas.call import ReplicaCall

#: So much of a text decides.
_CHARACTERS = 1024


def conversation(call: ReplicaCall) -> str:
    """A text that all turns of a conversation have in common: the messages up to the first one of the user, or the
    beginning of the prompt. Empty where the body has neither."""
    try:
        body: Any = json.loads(call.body)
    except (ValueError, RecursionError):
        # The replica refuses it.
        return ""
    if not isinstance(body, dict):
        return ""
    turns = body.get("messages", body.get("input"))
    if isinstance(turns, list):
        roles = [turn.get("role") if isinstance(turn, dict) else None for turn in turns]
        end = roles.index("user") + 1 if "user" in roles else len(turns)
        # A shared system prompt alone would send all conversations to one replica.
        return json.dumps(turns[:end])[-_CHARACTERS:]
    return json.dumps(body.get("prompt", turns))[:_CHARACTERS] if "prompt" in body or turns else ""


def ranked(text: str, names: Sequence[str]) -> list[str]:
    """The names in the order in which ``text`` prefers them. A name that comes or goes changes the first choice of its
    own share of texts alone.

    Source: D. Thaler, C. Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998 (highest random weight).
    """

    def weight(name: str) -> bytes:
        return hashlib.blake2b(f"{name}\n{text}".encode(), digest_size=8).digest()

    return sorted(names, key=weight, reverse=True)


def by_preference(text: str, queues: dict[str, int], imbalance: int) -> list[str]:
    """The names of replicas in the order in which a request with ``text`` tries them.

    Args:
        queues: the number of requests that each replica has.
        imbalance: a replica with so many more requests than the least loaded one comes after those that have fewer.
    """
    least = min(queues.values())
    order = ranked(text, list(queues)) if text else sorted(queues, key=queues.__getitem__)
    return sorted(order, key=lambda name: queues[name] - least >= imbalance)
