"""Digests of slots, with which ranks detect that they differ."""

from __future__ import annotations

import zlib

from speccompile.graph.arena import Arena
from speccompile.graph.tree import STORED

#: State on which the sequence and the next drafts depend, in addition to the tokens up to ``length``.
COMPARED = ("length", "emitted", "accepted", "alive")


def slot_digests(arena: Arena) -> list[int]:
    """A CRC of each slot's tokens, lengths and drafts."""
    lengths = arena["length"].tolist()
    columns = {name: arena[name].tolist() for name in COMPARED}
    drafts, counts = _drafts(arena)
    digests = []
    for slot, length in enumerate(lengths):
        text = arena["tokens"][slot, :length].cpu().numpy().tobytes()
        facts = [columns[name][slot] for name in COMPARED] + drafts[slot][: counts[slot]]
        digests.append(zlib.crc32(repr(facts).encode(), zlib.crc32(text)))
    return digests


def _drafts(arena: Arena) -> tuple[list[list[int]], list[int]]:
    names = next((names for names in (("draft_tokens", "draft_lens"), STORED) if names[0] in arena), None)
    if names is None:
        return [[]] * arena["length"].shape[0], [0] * arena["length"].shape[0]
    drafts, counts = (arena[name].tolist() for name in names)
    return drafts, counts
