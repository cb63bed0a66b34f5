"""Draft trees as the shapes of tiers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from speccompile.errors import InvalidOption
from speccompile.utils.numbers import is_int, python_numbers

#: State of a ready drafter's tree proposals: tokens and parents ``[N, P]``, and the number of tokens ``[N]``.
PROPOSAL = ("tree_tokens", "tree_parents", "tree_count")
#: State of the drafts that a drafter's executable stores for the target's executable: tokens ``[N, K]``, and the number
#: of valid ones ``[N]``.
STORED = ("stored_drafts", "stored_lens")


class Tree(int):
    """The shape of a tier whose drafts are a tree. As an ``int`` it is the number of draft tokens.

    Widths, buffers and costs depend on that number, as they depend on the draft length of a chain.

    Node 0 is the newest committed token; the draft tokens are the nodes from 1 on, parents before children.

    Attributes:
        depth: the depth of the deepest node. A step accepts at most this number of draft tokens.
        branches: for a dynamic tree, the largest number of children of a node; for a static tree, its greatest branch
            index plus one.
        parents: for a static tree, the parent of each node from 1 on; None for a dynamic tree.
        ranks: for a static tree, the index of each of these nodes among the children of its parent.
    """

    depth: int
    branches: int
    parents: tuple[int, ...] | None
    ranks: tuple[int, ...] | None

    def __new__(cls, *given: Any) -> Tree:
        """
        Raises:
            InvalidOption: always, since a number does not define a tree. Use :meth:`static` or :meth:`dynamic`.
        """
        reason = "give the shape: Tree.static(paths), or Tree.dynamic(nodes, depth, branches)"
        raise InvalidOption(where="Tree", name="arguments", value=given, reason=reason)

    @classmethod
    def static(cls, paths: Iterable[Iterable[int]]) -> Tree:
        """A tree of fixed form.

        Args:
            paths: one path for each node: the branch indices from the root to the node. ``(0,)`` is the likeliest first
                token. ``(1, 0)`` is the likeliest token after the second likeliest first token.

        Raises:
            InvalidOption: a path is empty, has an element that is not an index, occurs twice, or continues a path that
                is not given.
        """

        def refuse(reason: str) -> InvalidOption:
            return InvalidOption(where="Tree.static", name="paths", value=paths, reason=reason)

        if not isinstance(paths, Iterable):
            raise refuse("give paths from the root, such as [(0,), (1,), (0, 0)]")
        given = [tuple(map(python_numbers, path)) if isinstance(path, Iterable) else path for path in paths]
        for path in given:
            whole = isinstance(path, tuple) and all(is_int(x) for x in path)
            if not whole or not path or min(path) < 0:
                raise refuse(f"{path!r} must be a path: branch indices from the root on, each at least 0")
        if not given:
            raise refuse("give at least one path")
        ordered = sorted(set(given), key=lambda path: (len(path), path))
        if len(ordered) < len(given):
            raise refuse("each path must occur once, and one occurs twice")
        nodes = {(): 0} | {path: node for node, path in enumerate(ordered, 1)}
        if missing := next((path[:-1] for path in ordered if path[:-1] not in nodes), None):
            raise refuse(f"the path {missing!r} is missing, and others continue it; give it too")
        parents, ranks = tuple(nodes[path[:-1]] for path in ordered), tuple(path[-1] for path in ordered)
        return cls._of(len(ordered), max(map(len, ordered)), max(ranks) + 1, parents, ranks)

    @classmethod
    def dynamic(cls, nodes: int, depth: int, branches: int) -> Tree:
        """A tree of the ``nodes`` likeliest draft tokens that the drafter proposes, chosen for each sequence in each
        step.

        Args:
            nodes: the number of draft tokens.
            depth: the largest depth of a token.
            branches: the largest number of tokens after one token.

        Raises:
            InvalidOption: a number is not valid, or the tree cannot have so many nodes.
        """
        nodes, depth, branches = map(python_numbers, (nodes, depth, branches))
        for name, value in (("nodes", nodes), ("depth", depth), ("branches", branches)):
            if not is_int(value) or value < 1:
                reason = "it must be an int of at least 1"
                raise InvalidOption(where="Tree.dynamic", name=name, value=value, reason=reason)
        if depth > nodes:
            reason = f"a tree of {nodes} nodes is at most {nodes} deep; give more nodes, or a smaller depth"
            raise InvalidOption(where="Tree.dynamic", name="depth", value=depth, reason=reason)
        if branches == 1 and nodes > depth:
            reason = f"with one branch, a tree of depth {depth} has {depth} nodes"
            raise InvalidOption(where="Tree.dynamic", name="nodes", value=nodes, reason=reason)
        if branches > 1 and nodes > (most := _most_nodes(depth, branches, nodes)):
            reason = f"with {branches} branches, a tree of depth {depth} has at most {most} nodes"
            raise InvalidOption(where="Tree.dynamic", name="nodes", value=nodes, reason=reason)
        return cls._of(nodes, depth, branches, None, None)

    @classmethod
    def _of(
        cls, nodes: int, depth: int, branches: int, parents: tuple[int, ...] | None, ranks: tuple[int, ...] | None
    ) -> Tree:
        tree = int.__new__(cls, nodes)
        tree.depth, tree.branches, tree.parents, tree.ranks = depth, branches, parents, ranks
        return tree

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The paths of a static tree; empty for a dynamic tree."""
        found: list[tuple[int, ...]] = [()]
        for parent, rank in zip(self.parents or (), self.ranks or (), strict=True):
            found.append((*found[parent], rank))
        return tuple(found[1:])

    def draw(self) -> str:
        """A picture of the tree in text. A static tree has a line for each node: its number and its path. A dynamic
        tree has a line for each level: its largest number of nodes."""
        if self.parents is None:
            widest = [min(self.branches**level, int(self) - level + 1) for level in range(1, self.depth + 1)]
            levels = (f"level {level}: up to {count} nodes" for level, count in enumerate(widest, 1))
            return "\n".join([f"{int(self)} nodes, the likeliest", *levels])
        node_of = {path: node for node, path in enumerate(self.paths, 1)}
        # Sorted: the continuations of a token follow it.
        ordered = sorted(node_of)
        last_child = {path[:-1]: path for path in ordered}
        lines, bars = ["0  the newest token"], [""]
        for path in ordered:
            last = last_child[path[:-1]] == path
            lines.append(f"{bars[len(path) - 1]}{'└─' if last else '├─'} {node_of[path]}  {'.'.join(map(str, path))}")
            bars[len(path) :] = [bars[len(path) - 1] + ("   " if last else "│  ")]
        return "\n".join(lines)

    @property
    def fields(self) -> dict[str, Any]:
        """Plain values, from which :meth:`of` builds the same tree."""
        if self.parents is None:
            return {"nodes": int(self), "depth": self.depth, "branches": self.branches}
        return {"paths": [list(path) for path in self.paths]}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Tree:
        """The tree with these :attr:`fields`."""
        return cls.static(fields["paths"]) if "paths" in fields else cls.dynamic(**fields)

    @property
    def _shape(self) -> tuple[Any, ...]:
        return int(self), self.depth, self.branches, self.parents, self.ranks

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tree) and self._shape == other._shape

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._shape)

    def __str__(self) -> str:
        if self.parents is None:
            return f"tree of {int(self)} nodes, depth {self.depth}, {self.branches} branches"
        return f"tree of {' '.join('.'.join(map(str, path)) for path in self.paths)}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __repr__(self) -> str:
        if self.parents is None:
            return f"Tree.dynamic(nodes={int(self)}, depth={self.depth}, branches={self.branches})"
        return f"Tree.static({list(self.paths)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Tree.of, (self.fields,)


def _most_nodes(depth: int, branches: int, enough: int) -> int:
    """The largest number of nodes of a tree with this depth and two or more ``branches``. If it is at least ``enough``,
    any number that is at least ``enough``."""
    level = most = branches
    for _ in range(depth - 1):
        if most >= enough:
            break
        level *= branches
        most += level
    return most


def in_order(shapes: Iterable[int]) -> tuple[int, ...]:
    """``shapes`` sorted by their numbers of draft tokens; chains before trees of the same number."""
    return tuple(sorted(shapes, key=lambda shape: (int(shape), isinstance(shape, Tree), str(shape))))


def chains(draft_lens: Iterable[int]) -> tuple[int, ...]:
    """The shapes of ``draft_lens`` that are chains."""
    return tuple(shape for shape in draft_lens if not isinstance(shape, Tree))


def depth_of(shape: int) -> int:
    """The largest number of draft tokens that a step of this shape accepts."""
    return shape.depth if isinstance(shape, Tree) else shape
