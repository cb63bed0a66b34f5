"""Where the user's own passes stand: next to the pass that each names as its anchor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from speccompile.errors import InvalidOption
from speccompile.passes.base import Pass


def placed(passes: Sequence[Pass], own: Sequence[Pass]) -> tuple[Pass, ...]:
    """``passes`` with those of ``own`` among them whose anchor is there. Passes with one anchor keep their order."""
    order = list(passes)
    for item in own:
        names = [other.name for other in order]
        if after := [names.index(name) for name in item.anchors_after if name in names]:
            place = after[0] + 1
            while place < len(order) and order[place].anchors_after == item.anchors_after:
                place += 1
            order.insert(place, item)
        elif before := [names.index(name) for name in item.anchors_before if name in names]:
            order.insert(before[0], item)
    return tuple(order)


def check_passes(given: object) -> tuple[Pass, ...]:
    """The user's passes, checked by themselves.

    Raises:
        InvalidOption: one is no pass, has no place, or a name that another has.
    """

    def refuse(value: object, reason: str) -> InvalidOption:
        return InvalidOption(where="wrap", name="passes", value=value, reason=reason)

    if isinstance(given, Pass) or not isinstance(given, Iterable):
        raise refuse(given, "give a list of passes")
    own: list[Pass] = []
    for item in given:
        if not isinstance(item, Pass):
            raise refuse(item, "an item has to be an object of a class derived from speccompile.passes.Pass")
        if bool(item.anchors_after) == bool(item.anchors_before):
            raise refuse(item, f"set one of after and before of pass {item.name!r} to the name of a pass")
        if item.name in [other.name for other in own]:
            raise refuse(item, f"two passes have the name {item.name!r}")
        own.append(item)
    return tuple(own)
