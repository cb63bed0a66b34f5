"""A head of one layer and a mode that drafts with it: the smallest that uses everything a head may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx, nn
from transformers import PreTrainedModel

from speccompile.graph.layer_state import KVShape
from speccompile.graph.step_form import StepForm
from speccompile.graph.step_graph import StepGraph
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.base import Mode
from speccompile.modes.network.draft_head import DraftHead, HeadCache
from speccompile.modes.network.draft_network import DraftNetwork
from speccompile.modes.network.head_network import HeadNetwork
from speccompile.modes.network.passes import DraftByNetwork, forward_drafter
from speccompile.passes.base import Changes, Facts, Pass, facts
from speccompile.passes.step.draft_chain import Forward

HEADS, GROUPS, SIZE = 4, 2, 8


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q = nn.Linear(hidden, HEADS * SIZE, bias=False)
        self.k = nn.Linear(hidden, GROUPS * SIZE, bias=False)
        self.v = nn.Linear(hidden, GROUPS * SIZE, bias=False)
        self.o = nn.Linear(HEADS * SIZE, hidden, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cache: HeadCache) -> torch.Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, SIZE)) for linear in (self.q, self.k, self.v))
        # Each place has to know where it is, or an error in positions would not show.
        angle = positions[..., None, None] / 100
        return x + self.o(cache.attend(0, q * angle.cos(), k * angle.cos(), v * angle.sin(), SIZE**-0.5).flatten(-2))


class SmallHead(DraftHead):
    """``fuse`` makes of the target's hidden state what the layers read; later drafts have it from the head itself."""

    def __init__(self, hidden: int = 64, vocab: int = 128, own: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, own)
        self.fuse = nn.Linear(hidden, own, bias=False)
        self.layers = nn.ModuleList([Layer(own)])
        self.lm_head = nn.Linear(own, vocab, bias=False)
        self._hidden = hidden

    @property
    def hidden_size(self) -> int:
        return self._hidden

    @property
    def kv(self) -> Mapping[int, KVShape]:
        return {0: KVShape((GROUPS, SIZE), (GROUPS, SIZE), torch.float32)}

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, hidden_states: torch.Tensor, cache: HeadCache
    ) -> dict[str, torch.Tensor]:
        fused = self.fuse(hidden_states)
        hidden = self.layers[0](F.silu(fused) + self.embed(input_ids), position_ids, cache)
        return {"fused": fused, "hidden": hidden, "logits": self.lm_head(hidden)}


def small_head(seed: int = 0) -> SmallHead:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SmallHead().eval()


@dataclass(frozen=True)
class Draft(DraftByNetwork):
    """The hidden state before a text's newest token is thought to be nothing: this is not a good drafter."""

    name: ClassVar[str] = "draft_small_head"

    def forward(self, graph: StepGraph) -> Forward:
        carried: list[fx.Node] = []

        def forward(token: fx.Node, position: fx.Node, place: int) -> fx.Node:
            fused = carried[-1] if carried else graph.insert(nothing, token, before=graph.anchors.start)
            logits, hidden = forward_drafter(
                graph,
                token,
                position,
                graph.values["slots"],
                before=graph.anchors.start,
                outputs=("logits", "hidden"),
                given={"fused": fused},
            )
            carried.append(hidden)
            return logits

        return forward


def nothing(token: torch.Tensor) -> torch.Tensor:
    return torch.zeros((*token.shape, 32), device=token.device)


@dataclass(frozen=True)
class Read(Pass):
    """KV of what the target reads, of its own last hidden states."""

    name: ClassVar[str] = "read_small_head"
    looks_for: ClassVar[str] = "what the target reads"
    requires: ClassVar[Facts] = facts("target_inputs", "committed")
    provides: ClassVar[Facts] = facts("head_read")

    def run(self, graph: StepGraph) -> Changes:
        values = graph.values
        forward_drafter(
            graph,
            values["input_tokens"],
            values["positions"],
            values.get("target_slots", values["slots"]),
            before=graph.output,
            outputs=("kv",),
            given={"hidden_states": graph.anchors.layers[-1]},
        )
        return Changes(1)


@dataclass(frozen=True)
class SmallHeadMode(Mode):
    head: Any = None

    name: ClassVar[str] = "small_head"

    def network(self, model: PreTrainedModel, info: ModelInfo, max_len: int) -> DraftNetwork:
        own = ModelInfo("SmallHead", 1, info.vocab_size, 32, info.dtype, info.device)
        return HeadNetwork(self.head, own, max_len)

    def drafting(self, form: StepForm) -> list[Pass]:
        return [Draft(form.drafts)]

    def after_commit(self, form: StepForm) -> list[Pass]:
        return [Read()]

    def explain(self) -> str:
        return "a small head"
