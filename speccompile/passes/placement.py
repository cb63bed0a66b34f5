"""The places of the user's passes: next to the pass that each names as its anchor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from speccompile.errors import InvalidOption
from speccompile.passes.base import Pass
from speccompile.passes.user_pass import state_specs_of


def place_passes(passes: Sequence[Pass], own: Sequence[Pass]) -> tuple[Pass, ...]:
    """Insert those of ``own`` whose anchor is among ``passes``, or is one of ``own`` itself. Passes with the same
    anchor keep their order."""
    order = list(passes)
    left = list(own)
    #: By the name of the pass that they follow.
    followers: dict[str, list[Pass]] = {}
    while left:
        names = [other.name for other in order]
        item = next((item for item in left if _anchor(item, names) is not None), None)
        if item is None:
            break
        left.remove(item)
        anchor = _anchor(item, names)
        assert anchor is not None
        if item.anchors_before:
            order.insert(names.index(anchor), item)
            continue
        last = anchor
        while last in followers:
            last = followers[last][-1].name
        order.insert(names.index(last) + 1, item)
        followers.setdefault(anchor, []).append(item)
    return tuple(order)


def _anchor(item: Pass, names: Sequence[str]) -> str | None:
    return next((name for name in (*item.anchors_after, *item.anchors_before) if name in names), None)


def check_passes(given: object) -> tuple[Pass, ...]:
    """Check each of the user's passes.

    Raises:
        InvalidOption: one is not a pass, has no anchor, has the name of another one, or has an invalid attribute.
        PassFailed: its ``state_specs()`` fails.
    """

    def refuse(value: object, reason: str) -> InvalidOption:
        return InvalidOption(where="wrap", name="passes", value=value, reason=reason)

    if isinstance(given, Pass) or not isinstance(given, Iterable):
        raise refuse(given, "give a list of passes")
    own: list[Pass] = []
    for item in given:
        if not isinstance(item, Pass):
            raise refuse(item, "an item must be an object of a class derived from speccompile.passes.Pass")
        name = getattr(item, "name", None)
        if not isinstance(name, str) or not name.isidentifier():
            raise refuse(item, f"the name of a pass must be an identifier, got {name!r}")
        if not isinstance(getattr(item, "looks_for", None), str):
            raise refuse(item, f"looks_for of pass {name!r} must be a str that describes what the pass changes")
        for attribute in ("after", "before"):
            anchors = getattr(item, attribute)
            if not isinstance(anchors, str) and not _are_texts(anchors, tuple):
                raise refuse(item, f"{attribute} of pass {name!r} must be the name of a pass or a tuple of names")
        for attribute in ("requires", "provides", "invalidates", "writes"):
            if not _are_texts(getattr(item, attribute), frozenset):
                raise refuse(item, f"{attribute} of pass {name!r} must be facts(...), a frozenset of names")
        if bool(item.anchors_after) == bool(item.anchors_before):
            raise refuse(item, f"set one of after and before of pass {name!r} to the name of a pass")
        if name in [other.name for other in own]:
            raise refuse(item, f"two passes have the name {name!r}")
        state_specs_of(item)
        own.append(item)
    return tuple(own)


def _are_texts(value: object, kind: type[tuple[str, ...]] | type[frozenset[str]]) -> bool:
    return isinstance(value, kind) and all(isinstance(item, str) for item in value)
