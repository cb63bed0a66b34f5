"""The answer of a line of the table to one prompt: its tokens, its times and its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from speccompile.graph.tree import Tree
from speccompile.policies.base import Done
from speccompile.runtime.stats import RequestStats


@dataclass(frozen=True)
class Decoding:
    """Options of decoding. At temperature 0, tokens are the likeliest ones.

    Args:
        top_p, top_k: None leaves the value of the model's generation_config.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None

    def arguments(self) -> dict[str, float | int | bool]:
        """Arguments of ``submit`` and of transformers' ``generate``."""
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        drawn = {name: value for name, value in given.items() if value is not None} if self.temperature else {}
        return {"max_new_tokens": self.max_new_tokens, "do_sample": bool(self.temperature), **drawn}


@dataclass(frozen=True)
class Steps:
    """Columns of the decode steps of a request, in their order. Times are in milliseconds.

    Args:
        tiers: names of the tiers that ran: ``3`` or ``tree:8:6:3``.
        depths: most drafts that the step could accept: the drafts that it verified, or the depth of a tree.
        accepted, emitted: a and n of the acceptance rule.
        ms: None where a step also processed a prompt.
        scores: for the first drafts, the drafter's probability that all drafts up to each one are right.
    """

    tiers: tuple[str, ...] = ()
    depths: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    emitted: tuple[int, ...] = ()
    ms: tuple[float | None, ...] = ()
    scores: tuple[tuple[float, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.tiers)

    @property
    def acceptance_length(self) -> float:
        """Mean emitted tokens per step; 0.0 without steps."""
        return sum(self.emitted) / len(self) if self.tiers else 0.0


@dataclass(frozen=True)
class Answer:
    """An answer.

    Args:
        token_ids: new tokens, an EOS id included.
        first_seconds, seconds: until the first token, and until the end.
        drafts_by: for each drafter, the numbers of its draft tokens and of the accepted ones.
    """

    token_ids: tuple[int, ...]
    first_seconds: float
    seconds: float
    finish_reason: str
    steps: Steps = field(default_factory=Steps)
    drafts_by: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def tier_name(tier: int) -> str:
    """The name of a tier in the form of ``--tiers``; of a static tree, its number of nodes and its depth."""
    if not isinstance(tier, Tree):
        return str(int(tier))
    shape = (int(tier), tier.depth) if tier.parents is not None else (int(tier), tier.depth, tier.branches)
    return ":".join(["tree", *map(str, shape)])


def steps_of(done: Sequence[Done], stats: RequestStats) -> Steps:
    """The steps of the only request of ``done``, without those whose tokens it did not receive."""
    kept = [each for each in done if each.emitted[0]][: stats.row_steps]
    before = sum(each.emitted[0] for each in kept[:-1])
    # The last step may have emitted tokens after the end of the request.
    emitted = [each.emitted[0] for each in kept[:-1]] + [stats.emitted_tokens - before] * bool(kept)
    accepted = [min(each.accepted[0], count) for each, count in zip(kept, emitted, strict=True)]
    return Steps(
        tuple(tier_name(each.draft_len) for each in kept),
        tuple(_depth(each) for each in kept),
        tuple(accepted),
        tuple(emitted),
        tuple(None if each.milliseconds is None else round(each.milliseconds, 3) for each in kept),
        tuple(tuple(round(score, 4) for score in each.scores[0]) if each.scores else () for each in kept),
    )


def _depth(done: Done) -> int:
    return min(done.proposed[0], done.draft_len.depth) if isinstance(done.draft_len, Tree) else done.proposed[0]
