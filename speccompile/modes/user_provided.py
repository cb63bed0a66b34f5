"""The user's own drafter: a torch function or module that is traced into the step, or Python on the host."""

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
    """Drafts with the user's function ``draft``, which proposes drafts for the next step at the end of each step.

    Args:
        draft: a function, or an ``nn.Module`` in eval mode, called as ``draft(tokens, length, draft_len)``. ``tokens``,
            int64 ``[B, S]``, are the rows' sequences; only the first ``length``, int64 ``[B]``, tokens of a row are
            valid. ``draft_len`` is the number of drafts to propose. It returns draft tokens, int64 ``[B, draft_len]``,
            and the number of valid ones, int64 ``[B]``; 0 means no proposal. A value that is not a token of the target
            ends a row's drafts. The code becomes part of the step: it must be plain PyTorch, without control flow on
            values of tensors. Tensors that a function reads must be variables of an enclosing function or of its Python
            module. Those of a module must be parameters or buffers.
        host: ``draft`` is any callable on the host, called between steps as ``draft(tokens, draft_len)`` for each row
            that can have drafts. ``tokens`` is the sequence, a list of token ids. ``draft_len`` is the largest useful
            number of drafts. It returns a list of at most Kmax ids, or None for no proposal. An exception in it ends
            the row's request.
        reads_hidden: the parts of the target whose outputs ``draft`` receives: decoder layers, by index (negative from
            the end) or module path, or the module path of the final norm. ``draft`` is then called as ``draft(tokens,
            length, hidden, draft_len)``. ``hidden``, ``[B, M * number of parts]`` in the target's dtype, belongs to the
            last token that the target has read, which is the one before the newest.
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
            raise self.invalid("draft", kind, f"its tensors must be on {info.device}, as the target, got {where}")

    def _check_places(self, info: ModelInfo) -> None:
        def refuse(reason: str) -> None:
            raise self.invalid("reads_hidden", self.reads_hidden, reason)

        places, layers = self.reads_hidden, info.num_layers
        if not isinstance(places, tuple | list) or any(isinstance(at, bool) for at in places):
            refuse("give a tuple of decoder layers, such as (1, 5, -1)")
        if any(not isinstance(at, str) and not (isinstance(at, int) and -layers <= at < layers) for at in places):
            refuse(f"each must be a decoder layer of the target, 0 .. {layers - 1}, or a module path")
        if places and self.host:
            refuse("a drafter on the host receives only token ids; leave it out, or use host=False")

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
        # With the index, names are unique: without it, they can become equal when dots are replaced.
        weights = tuple(
            (f"drafter_{index}_{name.replace('.', '_')}", value.detach())
            for index, (name, value) in enumerate(self._weights())
        )
        options: dict[str, Any] = {"weights": weights, "drafter": _shown(self.draft), "foreign": True}
        if self.reads_hidden:
            return [ProposeFromHidden(self.propose, **options)]
        return [Propose(self.propose, advice=ADVICE, **options)]

    def propose(self, *text_and_weights: torch.Tensor, draft_len: int) -> tuple[torch.Tensor, ...]:
        """Call ``draft``. The first tensors are its arguments, the others replace its own weights: all weights of a
        graph must be its inputs."""
        count = len(self._arguments)
        text, weights = text_and_weights[:count], text_and_weights[count:]
        stands = {id(tensor): weight for (_, tensor), weight in zip(self._weights(), weights, strict=True)}
        if not isinstance(self.draft, nn.Module):
            with _Replaced(stands):
                returned: tuple[torch.Tensor, ...] = self.draft(*text, draft_len)
                return returned
        own = {name: stands[id(tensor)] for name, tensor in self._weight_paths()}
        # tie_weights=False: with it, torch does not restore the weights of a module with two names.
        proposal: tuple[torch.Tensor, ...] = torch.func.functional_call(
            self.draft, own, (*text, draft_len), tie_weights=False
        )
        return proposal

    def _weight_paths(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights by path. A tied weight has a path in each of its modules; a module with several names has one of
        them."""
        for path, module in self.draft.named_modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    yield f"{path}.{name}".lstrip("."), tensor

    def explain(self) -> str:
        where = "on the host, between steps" if self.host else "inside the step"
        reads = f", reading the hidden states of {', '.join(map(str, self.reads_hidden))}" if self.reads_hidden else ""
        return f"{_shown(self.draft)} proposes {where}{reads}"


class _Replaced(TorchFunctionMode):
    """In this mode, torch functions receive other tensors instead of those that a Python function holds.

    Args:
        stands: the other tensors, by the id of the original.
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
