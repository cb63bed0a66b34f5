"""Hydra: Medusa heads that also read the tokens before their draft.

Source: Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (2024, arXiv 2402.05109), section
3. Checkpoints are those of zankner/Hydra with heads of the kind ``mlp`` (``hydra_lm_head.pt``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.errors import InvalidHead
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.graph_capture.shard_styles import whole_weight
from speccompile.modes.network.checkpoint_files import (
    CHECKPOINT_FILES,
    check_tensors,
    checkpoint_folder,
    read_tensors,
)
from speccompile.modes.network.config_keys import ConfigKeys, read_keys
from speccompile.modes.path_heads import PathHeads, PathHeadsMode
from speccompile.passes.step.tap_hidden import Tap

FILE = "hydra_lm_head.pt"


class HydraBlock(nn.Module):
    """``r(x) + silu(linear(x))``, ``[..., M]`` of ``[..., inputs * M]``. r is a linear if there are several inputs."""

    def __init__(self, hidden_size: int, inputs: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs * hidden_size, hidden_size)
        self.res_connection = nn.Linear(inputs * hidden_size, hidden_size) if inputs > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.res_connection(x) + nn.functional.silu(self.linear(x))
        return out


class HydraHeads(PathHeads):
    """Hydra heads. Head k reads the hidden state and the embeddings of the newest token and of the k drafts before its
    own.

    Args:
        count: the number of heads; blocks: of each head; hidden_size: M; vocab_size: V.
        grounded: heads read tokens; else only the hidden state.
        bias: the last linears have a bias.
        offset: how many layers before the last one the hidden state is the output of; 0 is the last one's output after
            the final norm.
    """

    def __init__(
        self,
        count: int,
        blocks: int,
        hidden_size: int,
        vocab_size: int,
        *,
        grounded: bool = True,
        bias: bool = True,
        offset: int = 0,
    ) -> None:
        super().__init__()
        self.count, self.hidden_size, self.vocab_size = count, hidden_size, vocab_size
        self.grounded, self.offset = grounded, offset
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(
                HydraBlock(hidden_size, head + 2 if grounded else 1),
                *[HydraBlock(hidden_size) for _ in range(blocks - 1)],
            )
            for head in range(count)
        )
        self.hydra_lm_head = nn.ModuleList(nn.Linear(hidden_size, vocab_size, bias=bias) for _ in range(count))
        if grounded:
            self.input_embed_fn = nn.Embedding(vocab_size, hidden_size)

    @staticmethod
    def random(model: PreTrainedModel, count: int = 3, blocks: int = 1, seed: int = 0, **how: bool) -> HydraHeads:
        """Heads with random weights and the target's sizes, dtype and embedding. ``how``: ``grounded`` and ``bias``."""
        config = model.config.get_text_config(decoder=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            heads = HydraHeads(count, blocks, config.hidden_size, config.vocab_size, **how)
        heads.share(model)
        return heads.to(model.device, model.dtype).eval()

    def share(self, model: PreTrainedModel) -> None:
        """Read the embedding of the target ``model``."""
        if self.grounded:
            embedding = model.get_input_embeddings()
            assert isinstance(embedding, nn.Module)
            self.input_embed_fn.weight = nn.Parameter(whole_weight(embedding).detach(), requires_grad=False)

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:, None]

    def advance(self, index: int, state: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.grounded:
            state = torch.cat([state, self.input_embed_fn(tokens)], dim=-1)
        return state, self.hydra_lm_head[index](self.hydra_mlp[index](state))


def load_hydra(source: str | Path, target: PreTrainedModel) -> HydraHeads:
    """Load heads for ``target``, in the target's dtype, on its device.

    An embedding that the file does not have is the target's.

    Args:
        source: a folder with ``config.json`` and ``hydra_lm_head.pt`` or safetensors files; or the id of such a
            repository on the Hugging Face Hub.

    Raises:
        InvalidHead: no checkpoint was found, or its heads are of another kind.
        HeadKeys: tensors are missing, not known or of another shape. The message lists them.
    """
    folder, name = checkpoint_folder(source, (*CHECKPOINT_FILES, FILE)), str(source)
    keys = ConfigKeys(read_keys(folder / "config.json", name), name)
    if (kind := keys.get("hydra_head_arch", "mlp")) != "mlp":
        reason = f"its config has hydra_head_arch={kind!r}, and only heads of the kind 'mlp' are supported"
        raise InvalidHead(source=name, reason=reason)
    tensors = read_tensors(folder, name, binaries=(FILE, "pytorch_model.bin"))
    config = target.config.get_text_config(decoder=True)
    heads = HydraHeads(
        keys.size("hydra_num_heads"),
        keys.size("hydra_num_layers", 1),
        config.hidden_size,
        config.vocab_size,
        grounded=keys.flag("grounded_heads"),
        bias="hydra_lm_head.0.bias" in tensors,
        offset=keys.size("hidden_state_offset", 0, least=0),
    )
    expected = {key: tuple(value.shape) for key, value in heads.state_dict().items()}
    check_tensors(tensors, expected, name, optional={"input_embed_fn.weight"})
    heads.load_state_dict(tensors, strict=False)
    heads = heads.to(target.device, target.dtype).eval()
    if "input_embed_fn.weight" not in tensors:
        heads.share(target)
    return heads.requires_grad_(False)


@dataclass(frozen=True)
class Hydra(PathHeadsMode):
    """Drafts with Hydra heads when a step ends. K is at most the number of heads.

    Args:
        draft: :class:`HydraHeads` in eval mode, in the target's dtype and on its device; or the folder or hub id of a
            checkpoint.
    """

    name: ClassVar[str] = "hydra"

    def check(self, info: ModelInfo) -> None:
        if not isinstance(self.draft, HydraHeads | str | Path) or self.draft == "":
            reason = "give HydraHeads, the folder of a checkpoint with such heads, or its hub id"
            raise self.invalid("draft", type(self.draft).__name__ if self.draft is not None else None, reason)

    def loaded(self, model: PreTrainedModel) -> Hydra:
        if not isinstance(self.draft, HydraHeads):
            return replace(self, draft=load_hydra(self.draft, model))
        self.check_heads(model)
        return self

    @property
    def taps(self) -> tuple[Tap, ...]:
        offset = self.draft.offset
        return (Tap(-1, post_norm=True) if offset == 0 else Tap(-1 - offset),)

    def explain(self) -> str:
        if not isinstance(self.draft, HydraHeads):
            return f"the Hydra heads {self.draft} draft"
        return f"{self.draft.count} Hydra heads draft, each reading the drafts before its own"
