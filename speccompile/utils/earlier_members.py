"""Members of a class to derive from that an earlier version called: classes that still define them are refused."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from speccompile.errors import MemberOfBefore


def refuse_earlier_members(kind: type, base: str, earlier: Mapping[str, str]) -> None:
    """Check that ``kind``, a class derived from ``base``, defines no member that is no longer called.

    Args:
        earlier: by member, the sentence that states what to write instead. A member is a name, or a method with its
            parameters: ``"state()"``.

    Raises:
        MemberOfBefore: it defines one.
    """
    for name, value in vars(kind).items():
        members = [name]
        if inspect.isfunction(value):
            members.append(f"{name}({', '.join([*inspect.signature(value).parameters][1:])})")
        for member in members:
            if member in earlier:
                raise MemberOfBefore(owner=kind.__name__, member=member, base=base, instead=earlier[member])
