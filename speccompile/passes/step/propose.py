"""A ready drafter proposes at the end of a step, from committed state, for the step after it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

import speccompile.ops  # noqa: F401  defines the op
from speccompile.errors import PassError, error_line
from speccompile.graph.step_graph import StepGraph
from speccompile.ops.draft_rows import form_of
from speccompile.ops.proposals import store_rows_
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts

ProposeFunction = Callable[..., tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Propose(Pass):
    """Traces ``propose(tokens, length, *state, draft_len=Kmax)`` into the step and keeps the result for the next one.

    Args:
        propose: accepts the rows' ``tokens [B, S]`` and ``length [B]``, and, if the mode has its own state, the rows'
            ``slots [B]`` and those tensors whole; returns draft tokens ``[B, Kmax]`` and how many of them are valid,
            ``[B]``.
        state: names of the mode's own state tensors.
        whole: the same over the sequences of all slots, which is called instead: accepts ``tokens [N, S]``,
            ``length [N]``, ``slots [B]``, the mode's own state, ``draft_len`` and ``facts``.
        scored: it also returns the drafts' scores, float32 ``[B, Kmax]``.
        weights: tensors that ``propose`` receives after those, by name.
        drafter: what messages call it; ``advice`` ends the one about a function that cannot be traced.
        foreign: it may propose ids that are not tokens of the target. A row's drafts end before such an id.
    """

    propose: ProposeFunction
    state: tuple[str, ...] = ()
    whole: ProposeFunction | None = None
    scored: bool = False
    weights: tuple[tuple[str, torch.Tensor], ...] = field(default=(), compare=False)
    drafter: str = ""
    advice: str = ""
    foreign: bool = False

    name: ClassVar[str] = "propose"
    looks_for: ClassVar[str] = "committed tokens"
    region: ClassVar[PassRegion] = "propose"
    requires: ClassVar[Facts] = facts("committed")
    provides: ClassVar[Facts] = facts("proposed")

    def run(self, graph: StepGraph) -> Changes:
        core = [graph.state(name) for name in ("tokens", "length", "limit", "draft_tokens", "draft_lens")]
        score = [graph.state("draft_score")] if self.scored else []
        own = [*self.read(graph), *[graph.state(name) for name in self.state]]
        weights = [graph.constant(name, value) for name, value in self.weights]
        with tracing(self.propose, self.drafter, self.advice):
            drafts, _ = graph.insert(
                propose_and_store,
                *core,
                graph.values["slots"],
                *score,
                *own,
                *weights,
                propose=self.propose,
                whole=self.whole,
                longest=graph.layout.max_draft_len,
                scored=self.scored,
                stateful=bool(self.state),
                vocab_size=graph.layout.vocab_size if self.foreign else None,
                facts=frozenset(graph.facts),
            )
        return Changes(1, f"up to {drafts.meta['val'].shape[1]} draft tokens for the next step")

    def read(self, graph: StepGraph) -> list[fx.Node]:
        """Values of the step that ``propose`` receives in addition to tokens and length; none by default."""
        return []


@contextlib.contextmanager
def tracing(propose: ProposeFunction, drafter: str = "", advice: str = "") -> Iterator[None]:
    """Report errors inside as errors of ``propose``; ``drafter`` and ``advice`` are those of :class:`Propose`.

    Raises:
        PassError: it cannot be traced.
    """
    try:
        yield
    except PassError:
        raise
    except Exception as error:
        drafter = drafter or getattr(propose, "__qualname__", repr(propose))
        raise PassError(
            f"the drafter {drafter} cannot be traced into the step: {error}. It must be plain PyTorch without "
            f"decisions on values; constants come from torch.arange, torch.full or state{advice}",
            drafter=drafter,
            reason=error_line(error),
        ) from error


def propose_and_store(
    tokens: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_lens: torch.Tensor,
    slots: torch.Tensor,
    *others: torch.Tensor,
    propose: ProposeFunction,
    whole: ProposeFunction | None,
    longest: int,
    scored: bool,
    stateful: bool,
    vocab_size: int | None,
    facts: Set[str],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store in ``draft_tokens [N, Kmax]`` and ``draft_lens [N]`` what ``propose`` (or ``whole``) returns for the rows
    ``slots [B]``.

    Args:
        others: ``draft_score [N, Kmax]`` if ``scored``, then what was read of the step, the mode's own state and
            weights.
        stateful: ``propose`` receives the slots before these.
        vocab_size: drafts end before an id outside of it; None if there can be none.
        facts: the step's.

    Returns:
        Draft tokens ``[B, Kmax]`` and how many of them are valid, ``[B]``.
    """
    kept, own_state = others[: int(scored)], others[int(scored) :]
    own = (slots, *own_state) if stateful else own_state
    if whole is not None:
        proposal = whole(tokens, length, slots, *own_state, draft_len=longest, facts=facts)
    else:
        proposal = propose(tokens[slots], length[slots], *own, draft_len=longest)
    i64, rows = torch.int64, slots.shape[0]
    parts = [Part("draft tokens", (rows, longest), i64), Part("lengths", (rows,), i64)]
    parts += [Part("scores", (rows, longest), torch.float32)] * scored
    drafts, lens, *scores_of = checked(proposal, parts)
    for draft_score, value in zip(kept, scores_of, strict=True):
        form_of(store_rows_, facts)(draft_score, slots, value)
    if vocab_size is not None:
        are_tokens = (drafts >= 0) & (drafts < vocab_size)
        lens = torch.minimum(lens, are_tokens.long().cumprod(1).sum(1))
    torch.ops.speccompile.store_drafts_(draft_tokens, draft_lens, length, limit, slots, drafts, lens)
    return drafts, lens


@dataclass(frozen=True)
class Part:
    """Required shape and dtype of one tensor of a proposal."""

    what: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def checked(proposal: Any, parts: Sequence[Part]) -> tuple[torch.Tensor, ...]:
    """Return a drafter's ``proposal`` if its tensors are as ``parts`` require.

    Raises:
        PassError: the drafter returned something else.
    """
    names = " and ".join(f"{_kind(part.dtype)}{list(part.shape)} {part.what}" for part in parts)
    form = f"it must return {names}"
    if not (isinstance(proposal, tuple) and len(proposal) == len(parts)):
        seen = "one tensor" if isinstance(proposal, torch.Tensor) else repr(proposal)
        raise PassError(f"the drafter returned {seen}; {form}", returned=seen)
    for value, part in zip(proposal, parts, strict=True):
        if not isinstance(value, torch.Tensor) or value.shape != part.shape or value.dtype != part.dtype:
            seen = f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise PassError(f"the drafter returned {seen}; {form}", returned=seen)
    return proposal


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
