"""The executables of an engine: those built with the wrap, and further kinds, built on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from speccompile.graph.keys import ChunkKind, Kind, TierName
from speccompile.graph.tree import chains, depth_of, in_order
from speccompile.lowering.tier import Executables, Tier
from speccompile.utils.build_lock import one_build


class TierTable:
    """Tiers, mixed tiers and prompt chunks by name. Another thread may add kinds while a step runs, so a table is
    replaced and never changed.

    Args:
        executables: executables of the kind that plain requests run.
        build: builds the executables of another kind.
        build_mixed: builds the mixed tiers of a kind.

    Attributes:
        tiers, mixed_tiers: tiers by draft length, row count and kind.
        prefill: prompt chunks, by width and kind.
        catch_up: the executable in which the drafter reads tokens that the target has read before; None if every step
            updates the drafter.
        draft_lens, row_counts: values of the tiers, ascending. ``chains`` has the draft lengths that are not trees.
        deepest: most draft tokens that a step can accept.
    """

    def __init__(
        self,
        executables: Executables,
        build: Callable[[Kind], Executables],
        build_mixed: Callable[[Kind], Mapping[TierName, Tier]],
    ) -> None:
        self.tiers: dict[TierName, Tier] = dict(sorted(executables.tiers.items()))
        self.mixed_tiers: dict[TierName, Tier] = {}
        self.prefill: dict[tuple[int, ChunkKind], Tier] = dict(sorted(executables.prefill.items()))
        self.catch_up = next((self.prefill.pop(name) for name in list(self.prefill) if name[1] == "catch_up"), None)
        self.draft_lens = in_order({draft_len for draft_len, _, _ in self.tiers})
        self.chains = chains(self.draft_lens)
        self.deepest = max(map(depth_of, self.draft_lens))
        self.row_counts = tuple(sorted({rows for _, rows, _ in self.tiers}))
        self._build, self._build_mixed = build, build_mixed
        self._mixed_kinds: set[Kind] = set()

    def prepared(self, kind: Kind, *, watched: bool) -> bool:
        """Whether the executables of a kind are built. For requests whose tokens are ``watched`` these include the
        mixed tiers."""
        return any(of == kind for *_, of in self.tiers) and (not watched or kind in self._mixed_kinds)

    @one_build()
    def prepare(self, kind: Kind, *, watched: bool = False) -> None:
        """Build the missing executables of a kind. Arguments are those of :meth:`prepared`."""
        if not any(of == kind for *_, of in self.tiers):
            built = self._build(kind)
            self.prefill = {**self.prefill, **built.prefill}
            self.tiers = {**self.tiers, **built.tiers}
        if watched and kind not in self._mixed_kinds:
            self.mixed_tiers = {**self.mixed_tiers, **self._build_mixed(kind)}
            self._mixed_kinds.add(kind)

    @property
    def built(self) -> list[Tier]:
        """All executables that are built."""
        catch_up = [] if self.catch_up is None else [self.catch_up]
        return [*self.tiers.values(), *self.mixed_tiers.values(), *self.prefill.values(), *catch_up]

    def mixes(self, kind: Kind) -> bool:
        """Whether steps of that kind can also process prompts."""
        return any(of == kind for *_, of in self.mixed_tiers)
