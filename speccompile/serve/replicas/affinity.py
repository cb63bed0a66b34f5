"""Preference of a request for a replica: the one with the first turn of the conversation has its KV."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from speccompile.serve.replicas.call import ReplicaCall

#: Number of characters of a text that decide.
_CHARACTERS = 1024


def conversation(call: ReplicaCall) -> str:
    """Text that all turns of a conversation have in common: the messages up to the first one of the user, or the
    beginning of the prompt. Empty if the body has neither."""
    try:
        body: Any = json.loads(call.body)
    except (ValueError, RecursionError):
        # The replica will refuse the body.
        return ""
    if not isinstance(body, dict):
        return ""
    turns = body.get("messages", body.get("input"))
    if isinstance(turns, list):
        roles = [turn.get("role") if isinstance(turn, dict) else None for turn in turns]
        end = roles.index("user") + 1 if "user" in roles else len(turns)
        # Without the first message of the user, a shared system prompt would send all conversations to one replica.
        return json.dumps(turns[:end])[-_CHARACTERS:]
    return json.dumps(body.get("prompt", turns))[:_CHARACTERS] if "prompt" in body or turns else ""


def ranked(text: str, names: Sequence[str]) -> list[str]:
    """Order ``names`` by the preference of ``text``. A name that is added or removed changes the first choice only for
    its share of texts.

    Source: D. Thaler, C. Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998 (highest random weight).
    """

    def weight(name: str) -> bytes:
        return hashlib.blake2b(f"{name}\n{text}".encode(), digest_size=8).digest()

    return sorted(names, key=weight, reverse=True)


def by_preference(text: str, queues: dict[str, int], imbalance: int) -> list[str]:
    """Order the names of replicas for a request with ``text``: it tries them in this order.

    Args:
        queues: number of requests of each replica.
        imbalance: a replica with this many more requests than the least loaded one comes after those with fewer.
    """
    least = min(queues.values())
    order = ranked(text, list(queues)) if text else sorted(queues, key=queues.__getitem__)
    return sorted(order, key=lambda name: queues[name] - least >= imbalance)
