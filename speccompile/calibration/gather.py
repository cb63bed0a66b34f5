"""Gathers a calibration: the model reads texts, and the squares of the inputs of its linears are averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from speccompile.calibration import TOKENS
from speccompile.calibration.calibration import Calibration
from speccompile.errors import InvalidInput
from speccompile.graph_capture.adapters import inner_model
from speccompile.graph_capture.model_info import inspect_model, named_tensors
from speccompile.hidden_states.target_id import target_id
from speccompile.utils.product_linear import product_linear
from speccompile.utils.progress import task

#: Most tokens of one forward.
WIDTH = 1024


def calibrate(
    model: PreTrainedModel, texts: Iterable[Sequence[int] | torch.Tensor], *, tokens: int = TOKENS
) -> Calibration:
    """Gather the mean square of each input of each linear of ``model`` over ``texts``.

    ``wrap(weights="int4", calibration=...)`` uses it to choose scales that preserve large inputs. Texts that the model
    itself generates suit best (:func:`speccompile.training.make_texts`). Calibrate again after a change of the weights.

    Args:
        texts: token ids, each ``[n]``. The model reads them in pieces of 1024 tokens.
        tokens: largest number of tokens to read. Later texts are ignored.

    Raises:
        InvalidInput: the texts are empty, or contain ids outside the vocabulary.
        UserError: ``model`` cannot be wrapped.

    Source: the mean squares are those of llama.cpp's ``imatrix``. AWQ observes that errors at large inputs cost most
    (Lin et al. 2023, arXiv:2306.00978).
    """
    model = inner_model(model)
    info = inspect_model(model)
    squares = _InputSquares(model)
    read = 0
    with task("calibrate"), torch.no_grad():
        for text in texts:
            if isinstance(text, str):
                reason = "it is a str; give its token ids, tokenizer(text).input_ids"
                raise InvalidInput(name="a text to calibrate with", reason=reason)
            ids = torch.as_tensor(text, dtype=torch.int64).reshape(-1)[: tokens - read].to(info.device)
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < info.vocab_size:
                reason = f"it has token ids outside of 0 .. {info.vocab_size - 1}"
                raise InvalidInput(name="a text to calibrate with", reason=reason)
            for piece in ids.split(WIDTH):
                if piece.numel():
                    with squares:
                        model(input_ids=piece[None], use_cache=False)
            read += len(ids)
            if read >= tokens:
                break
    if not read:
        raise InvalidInput(name="the list of texts", reason="they have no tokens")
    return Calibration(target_id(model), read, squares.means())


class _InputSquares(TorchFunctionMode):
    """Adds up the squares of the inputs of the two-dimensional weights of ``model``."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        matrices = {name: tensor for name, tensor in named_tensors(model).items() if tensor.dim() == 2}
        # Tied weights are listed under their first name.
        self._names = {tensor.data_ptr(): name for name, tensor in reversed(matrices.items())}
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, int] = {}

    def means(self) -> dict[str, torch.Tensor]:
        return {name: (total / self._counts[name]).float().cpu() for name, total in self._sums.items()}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.linear:
            self._add(args[0], args[1])
        # GPT-2's linears call addmm.
        elif func is torch.addmm:
            self._add(args[1], args[2])
        elif linear := product_linear(func, args):
            self._add(linear.x, linear.weight)
        return func(*args, **(kwargs or {}))

    def _add(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        name = self._names.get(weight.data_ptr())
        if name is None:
            return
        rows = x.flatten(0, -2).double()
        total = self._sums.setdefault(name, rows.new_zeros(rows.shape[1]))
        total += rows.square().sum(0)
        self._counts[name] = self._counts.get(name, 0) + len(rows)
