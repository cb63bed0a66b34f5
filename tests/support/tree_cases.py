"""Proposals of drafts and shapes of trees, by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from speccompile import Tree

#: Parents of proposed tokens, in nodes.
proposals = st.integers(0, 12).flatmap(lambda count: st.tuples(*(st.integers(0, node) for node in range(count))))
shapes = st.one_of(
    st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(2, 3)).map(
        lambda sizes: Tree.dynamic(
            min(max(sizes[:2]), sum(sizes[2] ** level for level in range(1, sizes[1] + 1))), sizes[1], sizes[2]
        )
    ),
    st.sampled_from(
        [
            Tree.static([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]),
            Tree.static([(1,), (0,), (1, 1), (1, 0)]),
            Tree.static([(0,), (0, 0), (0, 0, 0)]),
        ]
    ),
)
