"""The hidden states that the first decoder layer reads, as a named value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.target.outline import layer_input

#: The named value ``[B, T, M]``.
TOKEN_EMBEDDINGS = "token_embeddings"


@dataclass(frozen=True)
class MarkEmbeddings(Pass):
    """Names ``token_embeddings`` ``[B, T, M]``, what the first decoder layer reads. Chunks of prompts replace some of
    them. A named value stays outside of the body ``prologue``."""

    name: ClassVar[str] = "mark_embeddings"
    named_values: ClassVar[tuple[str, ...]] = (TOKEN_EMBEDDINGS,)
    looks_for: ClassVar[str] = "the input of the first decoder layer"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("outlined")
    provides: ClassVar[Facts] = facts("embeddings_marked")

    def run(self, graph: StepGraph) -> Changes:
        graph.name_value(TOKEN_EMBEDDINGS, layer_input(graph, 0))
        return Changes(1)
