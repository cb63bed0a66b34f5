"""A drafter of the user's own: a torch function or module that is traced into the step, or Python on the host."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from speccompile.graph.state import StateSpec
from speccompile.graph.step_form import StepForm
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.base import HostDraft, Mode
from speccompile.modes.ready_mode import proposal_state
from speccompile.passes.base import Pass
from speccompile.passes.step.drafts import ReadDrafts
from speccompile.passes.step.propose import Propose
from speccompile.passes.step.propose_from_hidden import ProposeFromHidden
from speccompile.passes.step.tap_hidden import Tap
from speccompile.utils.torch_private import pytree


@dataclass(frozen=True)
class UserProvided(Mode):
    """Drafts that ``draft`` proposes from the sequence after each step, for the next one.

    Args:
        draft: called as ``draft(tokens, length, draft_len)``, with int64 tensors ``[B, S]`` (each row's text; what lies
            after ``length`` does not count) and ``[B]`` and the number of drafts wanted; returns int64 draft tokens
            ``[B, draft_len]`` and how many of them are valid, int64 ``[B]``, 0 for a row that abstains. What is not a
            token of the target ends a row's drafts. A function or an ``nn.Module`` in eval mode, of plain PyTorch
            without decisions on values: it becomes part of the step. Tensors that a function reads are variables of an
            enclosing function or of its module; a module has them as parameters and buffers.
        host: ``draft`` is any callable instead, called between steps for each row that can have drafts as
            ``draft(tokens, draft_len)``, with the text as a list of token ids and how many drafts are of use; returns a
            list of at most Kmax ids, or None to abstain. What goes wrong in it ends the request whose row it was.
        reads_hidden: places in the target whose hidden states ``draft`` receives: decoder layers, by index (negative
            ones count from the end) or module path, whose output is meant, or the path of the final norm. It is called
            as ``draft(tokens, length, hidden, draft_len)`` then. ``hidden`` ``[B, places * M]``, in the target's dtype,
            is of the last token that the target has read, the one before the newest.
    """

    draft: Any = None
    host: bool = False
    reads_hidden: tuple[int | str, ...] = ()

    name: ClassVar[str] = "user_provided"
    ready: ClassVar[bool] = True

    @property
    def host_draft(self) -> HostDraft | None:
        return self.draft if self.host else None

    def check(self, info: ModelInfo) -> None:
        if not isinstance(self.host, bool):
            raise self.invalid("host", self.host, "use True or False")
        self._check_places(info)
        if not callable(self.draft):
            signature = f"draft({'tokens' if self.host else ', '.join(self._arguments)}, draft_len)"
            raise self.invalid("draft", self.draft, f"give a callable {signature}")
        if self.host:
            return
        kind = _shown(self.draft)
        if isinstance(self.draft, nn.Module) and self.draft.training:
            raise self.invalid("draft", kind, "it is in training mode; call its eval()")
        if elsewhere := {str(tensor.device) for _, tensor in self._weights() if tensor.device != info.device}:
            where = ", ".join(sorted(elsewhere))
            raise self.invalid("draft", kind, f"it is on {where} and the target on {info.device}")

    def _check_places(self, info: ModelInfo) -> None:
        def refuse(reason: str) -> None:
            raise self.invalid("reads_hidden", self.reads_hidden, reason)

        places, layers = self.reads_hidden, info.num_layers
        if not isinstance(places, tuple | list) or any(isinstance(at, bool) for at in places):
            refuse("give the decoder layers as (1, 5, -1)")
        if any(not isinstance(at, str) and not (isinstance(at, int) and -layers <= at < layers) for at in places):
            refuse(f"the target's decoder layers are 0 .. {layers - 1}, or module paths")
        if places and self.host:
            refuse("a drafter on the host is called between steps, with token ids alone")

    @property
    def _arguments(self) -> tuple[str, ...]:
        return ("tokens", "length", "hidden") if self.reads_hidden else ("tokens", "length")

    def _weights(self) -> list[tuple[str, torch.Tensor]]:
        if isinstance(self.draft, nn.Module):
            return [*self.draft.named_parameters(), *self.draft.named_buffers()]
        if not inspect.isfunction(self.draft):
            return []
        read = inspect.getclosurevars(self.draft)
        variables = {**read.globals, **read.nonlocals}
        return [(name, value) for name, value in variables.items() if isinstance(value, torch.Tensor)]

    def state(self, tiers: Sequence[int]) -> list[StateSpec]:
        return proposal_state()

    def drafting(self, form: StepForm) -> list[Pass]:
        return [ReadDrafts(form.drafts)]

    @property
    def taps(self) -> tuple[Tap, ...]:
        return tuple(Tap(at) for at in self.reads_hidden)

    def after_commit(self, form: StepForm) -> list[Pass]:
        if self.host:
            return []
        # Two weights may have one name when dots are taken out of it.
        weights = tuple(
            (f"drafter_{index}_{name.replace('.', '_')}", value.detach())
            for index, (name, value) in enumerate(self._weights())
        )
        options: dict[str, Any] = {"weights": weights, "drafter": _shown(self.draft), "foreign": True}
        if self.reads_hidden:
            return [ProposeFromHidden(self.propose, **options)]
        return [Propose(self.propose, advice=ADVICE, **options)]

    def propose(self, *text_and_weights: torch.Tensor, draft_len: int) -> tuple[torch.Tensor, ...]:
        """What ``draft`` says of the first of these; the others stand for its own weights, so that none hides in the
        graph."""
        count = len(self._arguments)
        text, weights = text_and_weights[:count], text_and_weights[count:]
        stands = {id(tensor): weight for (_, tensor), weight in zip(self._weights(), weights, strict=True)}
        if not isinstance(self.draft, nn.Module):
            with _Replaced(stands):
                returned: tuple[torch.Tensor, ...] = self.draft(*text, draft_len)
                return returned
        own = {name: stands[id(tensor)] for name, tensor in self._places()}
        # If it tied them itself, it would not put back what a module with two names had.
        proposal: tuple[torch.Tensor, ...] = torch.func.functional_call(
            self.draft, own, (*text, draft_len), tie_weights=False
        )
        return proposal

    def _places(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Where the weights are: tied ones in each module, a module that has several names by one of them."""
        for path, module in self.draft.named_modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    yield f"{path}.{name}".lstrip("."), tensor

    def explain(self) -> str:
        where = "on the host, between steps" if self.host else "inside the step"
        reads = f", reading the hidden states of {', '.join(map(str, self.reads_hidden))}" if self.reads_hidden else ""
        return f"{_shown(self.draft)} proposes {where}{reads}"


class _Replaced(TorchFunctionMode):
    """Functions of torch receive other tensors in the place of those that a Python function holds.

    Args:
        stands: the other tensor, by the identity of each.
    """

    def __init__(self, stands: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._stands = stands

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map(lambda item: self._stands.get(id(item), item), (args, dict(kwargs or {})))
        return function(*args, **kwargs)


ADVICE = (
    ", or from a tensor that is a variable outside of the function, or a buffer of an nn.Module in eval mode. Or give "
    "host=True to have it called between steps with lists of ids"
)


def _shown(draft: Any) -> str:
    return str(getattr(draft, "__qualname__", type(draft).__name__))
