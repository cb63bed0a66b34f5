"""Number of drafts that the target would accept, counted on texts that it has read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Draft lengths whose acceptance length is reported, and the one that selects the best head.
REPORTED, JUDGED = (1, 3, 5, 7), 3


@dataclass(frozen=True)
class Acceptance:
    """Acceptance by position, estimated under greedy decoding.

    Args:
        rates: by position, the share of drafts that equal the target's choice, of those whose earlier drafts did.
        drafts: by position, the number of judged drafts.
    """

    rates: tuple[float, ...]
    drafts: tuple[int, ...]

    @classmethod
    def of(cls, counts: torch.Tensor) -> Acceptance:
        """Compute acceptance.

        Args:
            counts: int64 ``[2, K]``, numbers of accepted and of judged drafts.
        """
        accepted, judged = counts.tolist()
        rates = tuple(a / n if n else 0.0 for a, n in zip(accepted, judged, strict=True))
        return cls(rates, tuple(int(n) for n in judged))

    def length(self, draft_len: int) -> float:
        """Acceptance length at ``draft_len`` draft tokens: 1 + the expected number of accepted ones."""
        survives, total = 1.0, 1.0
        for rate in self.rates[:draft_len]:
            survives *= rate
            total += survives
        return total

    def metrics(self) -> dict[str, float]:
        """Metrics by name: ``length_K``, and ``accepted_J`` of the positions 1, 2, ..."""
        found = {f"length_{count}": self.length(count) for count in REPORTED}
        return found | {f"accepted_{place}": rate for place, rate in enumerate(self.rates, start=1)}

    def __str__(self) -> str:
        rates = " ".join(f"{rate:.2f}" for rate in self.rates)
        lengths = ", ".join(f"{self.length(count):.2f} at K={count}" for count in REPORTED)
        return f"drafts accepted {rates}; acceptance length {lengths}"


class DraftCounts:
    """Counts drafts of one batch, step by step.

    A row is judged at a step if its earlier drafts were accepted and the text continues with them. If a sampled text
    differs from the target's greedy choice, the greedy continuation is not known: from there on the row is neither
    accepted nor rejected. Texts of temperature 0 have no such rows.
    """

    def __init__(self) -> None:
        self._alive: torch.Tensor | None = None
        self._counts: list[torch.Tensor] = []

    def add(self, rows: torch.Tensor, drafts: torch.Tensor, chosen: torch.Tensor, text: torch.Tensor) -> None:
        """Count the drafts of the next step.

        Args:
            rows: bool ``[B, T]``, rows whose next token is known.
            drafts, chosen, text: int64 ``[B, T]``, for each row the head's draft, the target's choice, and the token of
                the text.
        """
        alive = rows if self._alive is None else rows & self._alive
        accepted = alive & (drafts == chosen)
        self._counts.append(torch.stack([accepted.sum(), alive.sum()]))
        self._alive = accepted & (text == chosen)

    def total(self) -> torch.Tensor:
        """Total numbers of accepted and of judged drafts, int64 ``[2, K]``."""
        return torch.stack(self._counts, dim=1)
