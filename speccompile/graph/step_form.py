"""The form of an executable: the properties that depend on the tier, and not on the mode or the model."""

from __future__ import annotations

from dataclasses import dataclass

from speccompile.graph.keys import ChunkKind, Kind
from speccompile.graph.tree import Tree


@dataclass(frozen=True)
class StepForm:
    """The form of a decode step, of a mixed step or of a prompt chunk.

    Args:
        drafts: draft tokens K of a chain, 0 for none; or a tree.
        rows: B, the rows that decode; 1 in a prompt chunk.
        kind: how tokens are chosen.
        prompt_rows: the rows of a mixed step that read a prompt; 0 in other steps.
        chunk: tokens T of a prompt chunk; 0 in a decode step.
        probabilities: the acceptance rule reads the probabilities that drafts are drawn from. A drafter with
            probabilities then names them ``draft_probs``, float32 ``[B, K, V]``, and draws with its own noise
            (``DRAFTS``).
        trees: some tier of the wrap is a tree. A ready drafter then also proposes trees.
        deepest: most drafts that a step of the wrap accepts.
        begin: for a drafter's executable that continues a chain: the number of drafts that are stored already. None if
            it drafts all of them.
    """

    drafts: int
    rows: int = 1
    kind: ChunkKind = "greedy"
    prompt_rows: int = 0
    chunk: int = 0
    probabilities: bool = False
    trees: bool = False
    deepest: int = 0
    begin: int | None = None

    @property
    def tree(self) -> Tree | None:
        """The drafts, if they are a tree."""
        return self.drafts if isinstance(self.drafts, Tree) else None

    @property
    def reads_prompts(self) -> bool:
        """Whether the target reads a part of a prompt: a prompt chunk or a mixed step."""
        return bool(self.chunk or self.prompt_rows)

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn. A drafter with probabilities then draws its drafts too, with the target's noise
        unless :attr:`probabilities` is set."""
        return self.kind not in ("greedy", "inner", "catch_up")

    @property
    def chain(self) -> tuple[int, bool, bool]:
        """Arguments of a pass that drafts a chain (:class:`~speccompile.passes.step.draft_chain.DraftChain`)."""
        return self.drafts, self.draws, self.probabilities

    @property
    def step_kind(self) -> Kind:
        """The kind of decode step that chooses tokens in the same way."""
        if self.kind == "prompt_scored":
            return "scored"
        return "greedy" if self.kind == "inner" or self.kind == "catch_up" else self.kind

    @property
    def name(self) -> str:
        """The name in stages and messages, such as ``tier K=3, 1 row``."""
        kind = "" if self.kind == "greedy" else f", {self.kind}"
        if self.kind == "catch_up":
            return f"catch-up T={self.chunk}"
        if self.chunk:
            return f"prefill T={self.chunk}{kind}"
        shape = f"K={self.drafts}" if self.tree is None else str(self.tree)
        return f"{'mixed ' * bool(self.prompt_rows)}tier {shape}, {self.rows} row{'s' * (self.rows > 1)}{kind}"
