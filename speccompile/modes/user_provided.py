"""A drafter of the user's own: a torch function or module that is traced into the step, or Python on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from speccompile.graph.state import StateSpec
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.base import HostDraft, Mode, proposal_state
from speccompile.passes.base import Facts, Pass, facts
from speccompile.passes.step.drafts import ReadDrafts
from speccompile.passes.step.propose import Propose


@dataclass(frozen=True)
class UserProvided(Mode):
    """Drafts that ``draft`` proposes from the sequence after each step, for the next one.

    Args:
        draft: called as ``draft(tokens, length, draft_len)``, with int64 tensors ``[B, S]`` (each row's text; what lies
            behind ``length`` does not count) and ``[B]`` and the number of drafts wanted; returns int64 draft tokens
            ``[B, draft_len]`` and how many of them count, int64 ``[B]``, 0 for a row that abstains; what is no token of
            the target ends a row's drafts. A function or an ``nn.Module`` in eval mode, of plain PyTorch without
            decisions on values: it becomes part of the step.
        host: ``draft`` is any callable instead, called between steps for each row that can have drafts as
            ``draft(tokens, draft_len)``, with the text as a list of token ids and how many drafts are of use; returns a
            list of at most Kmax ids, or None to abstain. What goes wrong in it ends the request whose row it was.
    """

    draft: Any = None
    host: bool = False

    name: ClassVar[str] = "user_provided"
    ready: ClassVar[bool] = True

    @property
    def goals(self) -> Facts:  # type: ignore[override]
        return facts() if self.host else facts("proposed")

    @property
    def host_draft(self) -> HostDraft | None:
        return self.draft if self.host else None

    def check(self, info: ModelInfo) -> None:
        if not isinstance(self.host, bool):
            raise self.invalid("host", self.host, "use True or False")
        if not callable(self.draft):
            signature = "draft(tokens, draft_len)" if self.host else "draft(tokens, length, draft_len)"
            raise self.invalid("draft", self.draft, f"give a callable {signature}")
        if self.host or not isinstance(self.draft, nn.Module):
            return
        kind = type(self.draft).__name__
        if self.draft.training:
            raise self.invalid("draft", kind, "it is in training mode; call its eval()")
        if elsewhere := {str(tensor.device) for _, tensor in self._weights() if tensor.device != info.device}:
            where = ", ".join(sorted(elsewhere))
            raise self.invalid("draft", kind, f"it is on {where} and the target on {info.device}")

    def _weights(self) -> list[tuple[str, torch.Tensor]]:
        if not isinstance(self.draft, nn.Module):
            return []
        return [*self.draft.named_parameters(), *self.draft.named_buffers()]

    def state(self) -> list[StateSpec]:
        return proposal_state()

    def draft_passes(self, draft_len: int) -> list[Pass]:
        return [ReadDrafts(draft_len)]

    def commit_passes(self) -> list[Pass]:
        if self.host:
            return []
        # Two weights may have one name when dots are taken out of it.
        weights = tuple(
            (f"drafter_{index}_{name.replace('.', '_')}", value.detach())
            for index, (name, value) in enumerate(self._weights())
        )
        return [Propose(self.propose, weights=weights, drafter=_shown(self.draft), advice=ADVICE, foreign=True)]

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, *weights: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, ...]:
        """What ``draft`` says; ``weights`` stand for its own, so that none hides in the graph."""
        if not isinstance(self.draft, nn.Module):
            proposal: tuple[torch.Tensor, ...] = self.draft(tokens, length, draft_len)
            return proposal
        stands = {id(tensor): weight for (_, tensor), weight in zip(self._weights(), weights, strict=True)}
        own = {name: stands[id(tensor)] for name, tensor in self._places()}
        # Told to tie them itself, it would not put back what a module with two names had.
        proposal = torch.func.functional_call(self.draft, own, (tokens, length, draft_len), tie_weights=False)
        return proposal

    def _places(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Where the weights are: tied ones in each module, a module that has several names by one of them."""
        for path, module in self.draft.named_modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    yield f"{path}.{name}".lstrip("."), tensor

    def explain(self) -> str:
        where = "on the host, between steps" if self.host else "inside the step"
        return f"{_shown(self.draft)} proposes {where}"


ADVICE = ", or give host=True to have it called between steps with lists of ids"


def _shown(draft: Any) -> str:
    return str(getattr(draft, "__qualname__", type(draft).__name__))
