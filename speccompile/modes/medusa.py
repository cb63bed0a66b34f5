"""Medusa: independent heads over the target's last hidden state. Head k predicts the k-th draft token.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024). Drafts
are a chain of each head's likeliest token (section 2.1), or trees (section 2.2). Checkpoints are read in the layouts of
FasterDecoding/Medusa (``medusa/model/medusa_model.py``: a head is blocks and a linear), vLLM
(``model_executor/models/medusa.py``) and TensorRT-LLM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from speccompile.errors import HeadKeys, InvalidHead
from speccompile.graph.state import K, N, StateSpec
from speccompile.graph.step_form import StepForm
from speccompile.graph.tree import Tree
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.base import Mode
from speccompile.modes.network.checkpoint_files import checkpoint_folder, read_tensors
from speccompile.modes.ready_mode import proposal_state
from speccompile.passes.base import Pass
from speccompile.passes.step.drafts import ReadDrafts
from speccompile.passes.step.independent_tree import CHOICES, ReadIndependentTree, choice_state
from speccompile.passes.step.propose_from_hidden import ProposeFromHidden, ProposeTreeFromHidden
from speccompile.passes.step.ranked_tree import of_independent
from speccompile.passes.step.tap_hidden import Tap
from speccompile.passes.step.tree_drafts import ReadTree

#: Patterns of tensor names in all layouts. In FasterDecoding's, the number of the last linear follows that of the last
#: block.
_BLOCK = re.compile(
    r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\.(weight|bias)"
    r"|(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"
    r"|medusa_heads\.(\d+)\.medusa_layers\.(\d+)\.linear\.(weight|bias)"
)
_LM_HEAD = re.compile(
    r"(?:medusa_heads?\.)?(\d+)\.\d+\.weight"
    r"|(?:medusa_heads\.)?lm_heads\.(\d+)\.weight"
    r"|medusa_heads\.(\d+)\.lm_head\.weight"
)
_OF_HEADS = re.compile(r"(medusa_heads?|blocks|lm_heads|\d+)\..*|token_map")


#: The largest number of a head's tokens after one token of a tree. The paper's trees have ten.
MOST_BRANCHES = 10


class MedusaBlock(nn.Module):
    """``x + silu(linear(x))``, ``[..., M]``."""

    def __init__(self, hidden_size: int, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, bias=bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + nn.functional.silu(self.linear(hidden))


class MedusaHeads(nn.ModuleList):
    """Heads in FasterDecoding's layout: each is ``num_blocks`` blocks and a linear ``[V, M]`` without bias."""

    def __init__(
        self, num_heads: int, num_blocks: int, hidden_size: int, vocab_size: int, *, bias: bool = True
    ) -> None:
        super().__init__(
            nn.Sequential(
                *[MedusaBlock(hidden_size, bias=bias) for _ in range(num_blocks)],
                nn.Linear(hidden_size, vocab_size, bias=False),
            )
            for _ in range(num_heads)
        )
        self.hidden_size, self.vocab_size = hidden_size, vocab_size

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, heads, V]`` of hidden states ``[B, M]`` after the target's final norm.

        Head k (from 0) predicts the token k + 2 positions after the one of the hidden state. The target itself predicts
        the next position.
        """
        return torch.stack([head(hidden) for head in self], 1)


def load_medusa(source: str | Path, target: PreTrainedModel) -> MedusaHeads:
    """Load heads for ``target``, in the target's dtype, on its device. The number of heads is that of the checkpoint.

    Args:
        source: a folder with ``medusa_lm_head.pt``, safetensors files or a ``pytorch_model.bin``; or the id of such a
            repository on the Hugging Face Hub. If the files hold a whole model, only the heads are read.

    Raises:
        InvalidHead: no checkpoint was found, or it has no heads.
        HeadKeys: tensors are missing, not known or of another shape. The message lists them.
    """
    name = str(source)
    folder = checkpoint_folder(source, ["config.json", "*.safetensors", "pytorch_model.bin", "medusa_lm_head.pt"])
    tensors = read_tensors(folder, name, binaries=("medusa_lm_head.pt", "pytorch_model.bin"))
    blocks, lm_heads = _sorted(tensors, name)
    config = target.config.get_text_config(decoder=True)
    num_heads = 1 + max(lm_heads, default=-1)
    num_blocks = 1 + max((block for _, block, _ in blocks), default=-1)
    # In vLLM's layout the linears of blocks can be without biases.
    bias = any(part == "bias" for _, _, part in blocks)
    if not num_heads:
        raise InvalidHead(source=name, reason="it has no Medusa heads (tensors such as 0.1.weight)")
    with torch.device("meta"):
        heads = MedusaHeads(num_heads, num_blocks, config.hidden_size, config.vocab_size, bias=bias)
    own = {f"{head}.{block}.linear.{part}": tensor for (head, block, part), tensor in blocks.items()}
    own |= {f"{head}.{num_blocks}.weight": tensor for head, tensor in lm_heads.items()}
    wanted = {key: tuple(value.shape) for key, value in heads.state_dict().items()}
    problems = [f"missing: {key} {list(shape)}" for key, shape in wanted.items() if key not in own]
    problems += [
        f"of another shape: {key} is {list(own[key].shape)} and must be {list(shape)}"
        for key, shape in wanted.items()
        if key in own and tuple(own[key].shape) != shape
    ]
    if problems:
        raise HeadKeys(source=name, problems="".join(f"\n  {problem}" for problem in problems))
    heads.load_state_dict(own, assign=True)
    return heads.to(target.device, target.dtype).eval().requires_grad_(False)


def _sorted(
    tensors: Mapping[str, torch.Tensor], name: str
) -> tuple[dict[tuple[int, int, str], torch.Tensor], dict[int, torch.Tensor]]:
    """The tensors of blocks by head, block and part; and the last linears by head. Other weights of a whole model are
    left out."""
    blocks: dict[tuple[int, int, str], torch.Tensor] = {}
    lm_heads: dict[int, torch.Tensor] = {}
    unknown: list[str] = []
    for key, tensor in tensors.items():
        if found := _BLOCK.fullmatch(key):
            head, block, part = (group for group in found.groups() if group is not None)
            blocks[int(head), int(block), part] = tensor
        elif found := _LM_HEAD.fullmatch(key):
            lm_heads[int(next(group for group in found.groups() if group is not None))] = tensor
        elif _OF_HEADS.fullmatch(key):
            unknown.append(f"\n  not known: {key} {list(tensor.shape)}")
    if unknown:
        raise HeadKeys(source=name, problems="".join(unknown))
    return blocks, lm_heads


@dataclass(frozen=True)
class Medusa(Mode):
    """Drafts with Medusa heads when a step ends. K is at most the number of heads.

    Args:
        draft: :class:`MedusaHeads` in eval mode, in the target's dtype and on its device; or the folder or hub id of a
            checkpoint.
    """

    draft: Any = None

    name: ClassVar[str] = "medusa"
    ready: ClassVar[bool] = True
    drafts_from_hidden: ClassVar[bool] = True
    drafts_trees: ClassVar[bool] = True

    def check(self, info: ModelInfo) -> None:
        if not isinstance(self.draft, MedusaHeads | str | Path) or self.draft == "":
            reason = "give MedusaHeads, the folder of a checkpoint with such heads, or its hub id"
            raise self.invalid("draft", type(self.draft).__name__ if self.draft is not None else None, reason)

    def loaded(self, model: PreTrainedModel) -> Medusa:
        if not isinstance(self.draft, MedusaHeads):
            return replace(self, draft=load_medusa(self.draft, model))
        heads, config = self.draft, model.config.get_text_config(decoder=True)
        weight = next(heads.parameters())
        sizes = (config.hidden_size, config.vocab_size)
        reason = None
        if (heads.hidden_size, heads.vocab_size) != sizes:
            given = f"{heads.hidden_size}, {heads.vocab_size}"
            reason = f"it must have M, V = {sizes[0]}, {sizes[1]}, as the target, got {given}"
        elif (weight.dtype, weight.device) != (model.dtype, model.device):
            reason = f"it must be {model.dtype} on {model.device}, as the target, got {weight.dtype} on {weight.device}"
        elif heads.training:
            reason = "it is in training mode; call its eval()"
        if reason:
            raise InvalidHead(source="that was given", reason=reason)
        return self

    @property
    def most_drafts(self) -> int | None:
        return len(self.draft) if isinstance(self.draft, MedusaHeads) else None

    def state(self, tiers: Sequence[int]) -> list[StateSpec]:
        own = [*proposal_state(tiers), StateSpec("draft_score", (N, K), torch.float32)]
        trees = any(isinstance(shape, Tree) for shape in tiers)
        return [*own, choice_state(len(self.draft), self._branches)] if trees else own

    def drafting(self, form: StepForm) -> list[Pass]:
        tree = form.tree
        if tree is None:
            return [ReadDrafts(form.drafts)]
        return [ReadTree(tree) if tree.parents is None else ReadIndependentTree(tree, self._branches)]

    @property
    def taps(self) -> tuple[Tap, ...]:
        return (Tap(-1, post_norm=True),)

    def after_commit(self, form: StepForm) -> list[Pass]:
        weights = tuple((f"medusa_{name.replace('.', '_')}", value) for name, value in self.draft.named_parameters())
        proposals: list[Pass] = [ProposeFromHidden(self.propose, weights=weights, scored=True)]
        if form.trees:
            proposals.append(ProposeTreeFromHidden(self.propose_tree, (CHOICES,), weights=weights))
        return proposals

    @property
    def _branches(self) -> int:
        return min(MOST_BRANCHES, self.draft.vocab_size)

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, hidden: torch.Tensor, *weights: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Propose a chain for every row.

        Args:
            hidden: ``[B, M]``, after the target's final norm.
            weights: the heads' parameters, as tensors of the graph.
            draft_len: Kmax.

        Returns:
            Draft tokens ``[B, Kmax]``, the number of valid ones ``[B]``, and for each the probability that it and all
                drafts before it are right, float32 ``[B, Kmax]``.
        """
        best, drafts = self._logits(hidden, weights)[:, :draft_len].float().log_softmax(-1).max(-1)
        # If some tiers are trees, Kmax can exceed the number of heads.
        missing = (0, draft_len - drafts.shape[1])
        count = torch.full_like(length, drafts.shape[1])
        return pad(drafts, missing), count, pad(best.cumsum(1).exp(), missing)

    def propose_tree(
        self,
        tokens: torch.Tensor,
        length: torch.Tensor,
        slots: torch.Tensor,
        hidden: torch.Tensor,
        *weights: torch.Tensor,
        nodes: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Propose the likeliest tree of the heads' tokens. A head's tokens do not depend on those of other heads.

        See :meth:`speccompile.modes.ready_mode.ReadyMode.propose_tree`. The last of ``weights`` is the state that
        stores each head's tokens for static trees.
        """
        *own, choices = weights
        drafts, logprobs = torch.ops.speccompile.likeliest(self._logits(hidden, own), self._branches)
        choices.index_put_((slots,), drafts.flatten(1))
        return of_independent(drafts, logprobs, nodes)

    def _logits(self, hidden: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Logits ``[B, heads, V]`` of hidden states ``[B, M]``, with these ``weights``."""
        own = dict(zip((name for name, _ in self.draft.named_parameters()), weights, strict=True))
        logits: torch.Tensor = torch.func.functional_call(self.draft, own, (hidden,))
        return logits

    def explain(self) -> str:
        if not isinstance(self.draft, MedusaHeads):
            return f"the Medusa heads {self.draft} draft"
        return f"{len(self.draft)} Medusa heads draft, each one token, over what the lm_head reads"
