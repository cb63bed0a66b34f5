"""MLP speculators: a recurrent network without attention drafts from the target's last hidden state.

Source: Wertheimer et al., "Accelerating Production LLMs with Combined Token/Embedding Speculators" (2024, arXiv
2404.19124), section 3. Checkpoints are those of IBM (``MLPSpeculatorPreTrainedModel``), as vLLM reads them
(``model_executor/models/mlp_speculator.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.errors import InvalidHead
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.network.checkpoint_files import (
    CHECKPOINT_FILES,
    check_tensors,
    checkpoint_folder,
    read_tensors,
    renamed,
)
from speccompile.modes.network.config_keys import ConfigKeys, read_keys
from speccompile.modes.path_heads import PathHeads, PathHeadsMode

MODEL_TYPE = "mlp_speculator"
#: Parts of a stage, and the first index of each that tied weights share.
TIED = {"emb": 0, "proj": 1, "head": 0, "ln": 0}


class SpeculatorNorm(nn.Module):
    """Root mean square norm over the last dimension, with a scale and a shift."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * unit_norm(x) + self.bias


def unit_norm(x: torch.Tensor) -> torch.Tensor:
    """``x`` ``[..., S]`` divided by its root mean square."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class MlpSpeculator(PathHeads):
    """An MLP speculator. Stage k is an embedding, a projection of the state, a norm, and an lm_head.

    Args:
        count: the number of stages; hidden_size: M; inner_size: S, the size of the state; vocab_size: V.
        tied: all stages share their weights, but for the first projection.
        scale_input: the hidden state is normalised first.
    """

    def __init__(
        self,
        count: int,
        hidden_size: int,
        inner_size: int,
        vocab_size: int,
        *,
        tied: bool = False,
        scale_input: bool = False,
    ) -> None:
        super().__init__()
        self.count, self.hidden_size, self.vocab_size = count, hidden_size, vocab_size
        self.inner_size, self.tied, self.scale_input = inner_size, tied, scale_input
        own, later = (1, min(count, 2)) if tied else (count, count)
        self.emb = nn.ModuleList(nn.Embedding(vocab_size, inner_size) for _ in range(own))
        sizes = [hidden_size, *[inner_size] * (later - 1)]
        self.proj = nn.ModuleList(nn.Linear(size, inner_size, bias=False) for size in sizes)
        self.head = nn.ModuleList(nn.Linear(inner_size, vocab_size, bias=False) for _ in range(own))
        self.ln = nn.ModuleList(SpeculatorNorm(inner_size) for _ in range(own))
        state_weight = 0.5 ** (0.5 / count)
        #: The weight of a token's embedding, relative to that of the state.
        self.token_weight = sqrt((1 - state_weight**2) * inner_size / 2) / state_weight

    @staticmethod
    def random(
        model: PreTrainedModel, count: int = 3, inner_size: int = 0, seed: int = 0, **how: bool
    ) -> MlpSpeculator:
        """A speculator with random weights and the target's sizes and dtype. ``how``: ``tied`` and ``scale_input``."""
        config = model.config.get_text_config(decoder=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inner = inner_size or config.hidden_size
            made = MlpSpeculator(count, config.hidden_size, inner, config.vocab_size, **how)
            for parameter in made.parameters():
                if parameter.ndim == 2:
                    nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        return made.to(model.device, model.dtype).eval()

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        state = hidden[:, None]
        return unit_norm(state) / sqrt(2) if self.scale_input else state

    def advance(self, index: int, state: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def of(part: nn.ModuleList) -> nn.Module:
            return part[min(index, len(part) - 1)]

        state = of(self.proj)(state) + self.token_weight * of(self.emb)(tokens)
        state = nn.functional.gelu(of(self.ln)(state))
        return state, of(self.head)(state)


def load_mlp_speculator(source: str | Path, target: PreTrainedModel) -> MlpSpeculator:
    """Load an MLP speculator for ``target``, in the target's dtype, on its device.

    Args:
        source: a folder with ``config.json`` and safetensors files or ``pytorch_model.bin``; or the id of such a
            repository on the Hugging Face Hub.

    Raises:
        InvalidHead: no checkpoint was found, or it is of another kind or for another target.
        HeadKeys: keys are missing, not known or of another shape. The message lists them.
    """
    folder, name = checkpoint_folder(source, CHECKPOINT_FILES), str(source)
    keys = ConfigKeys(read_keys(folder / "config.json", name), name)
    if (kind := keys.get("model_type")) != MODEL_TYPE:
        raise InvalidHead(source=name, reason=f"model_type in its config must be {MODEL_TYPE!r}, got {kind!r}")
    hidden, vocab = keys.size("emb_dim"), keys.size("vocab_size")
    text = target.config.get_text_config(decoder=True)
    if (hidden, vocab) != (text.hidden_size, text.vocab_size):
        own = f"M, V = {text.hidden_size}, {text.vocab_size}"
        raise InvalidHead(source=name, reason=f"it is for another target: it must have {own}, got {hidden}, {vocab}")
    made = MlpSpeculator(
        keys.size("n_predict"),
        hidden,
        keys.size("inner_dim", 0, least=0) or hidden,
        vocab,
        tied=keys.flag("tie_weights"),
        scale_input=keys.flag("scale_input"),
    )
    tensors = renamed(read_tensors(folder, name), ((r"^speculator\.", ""),), name)
    if made.tied:
        tensors = untied(tensors, name)
    check_tensors(tensors, {key: tuple(value.shape) for key, value in made.state_dict().items()}, name)
    made.load_state_dict(tensors)
    return made.to(target.device, target.dtype).eval().requires_grad_(False)


def untied(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """``tensors`` of tied weights without their copies, which a file may have.

    Raises:
        InvalidHead: a copy differs.
    """
    found = {}
    for key, value in tensors.items():
        part, _, rest = key.partition(".")
        index, _, last = rest.partition(".")
        first = f"{part}.{TIED.get(part, 0)}.{last}"
        if part not in TIED or not index.isdigit() or int(index) <= TIED[part]:
            found[key] = value
        elif first not in tensors or not torch.equal(tensors[first], value):
            reason = f"its config has tie_weights=true, and {key} differs from {first}"
            raise InvalidHead(source=name, reason=reason)
    return found


@dataclass(frozen=True)
class MlpSpeculatorMode(PathHeadsMode):
    """Drafts with an MLP speculator when a step ends. K is at most its ``n_predict``.

    Args:
        draft: an :class:`MlpSpeculator` in eval mode, in the target's dtype and on its device; or the folder or hub id
            of a checkpoint.
    """

    name: ClassVar[str] = MODEL_TYPE

    def check(self, info: ModelInfo) -> None:
        if not isinstance(self.draft, MlpSpeculator | str | Path) or self.draft == "":
            reason = "give an MlpSpeculator, the folder of a checkpoint, or its hub id"
            raise self.invalid("draft", type(self.draft).__name__ if self.draft is not None else None, reason)

    def loaded(self, model: PreTrainedModel) -> MlpSpeculatorMode:
        if not isinstance(self.draft, MlpSpeculator):
            return replace(self, draft=load_mlp_speculator(self.draft, model))
        self.check_heads(model)
        return self

    def explain(self) -> str:
        if not isinstance(self.draft, MlpSpeculator):
            return f"the MLP speculator {self.draft} drafts"
        return f"an MLP speculator of {self.draft.count} stages drafts over what the lm_head reads"
