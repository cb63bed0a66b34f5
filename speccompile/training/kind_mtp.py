"""MTP modules: initialisation, training and saving.

One module is trained. It drafts token by token, and reads its own output from the second token on, as in Cai et al.,
"FastMTP" (2025).
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.graph_capture.model_info import decoder_layers
from speccompile.heads import MtpHead, load_mtp, save_mtp
from speccompile.modes.mtp.head import norm_of
from speccompile.training.kinds import NEW, HeadKind
from speccompile.training.mtp_chain import MtpChain
from speccompile.training.teacher import Teacher
from speccompile.training.unrolled import UnrolledTraining


class MtpKind(HeadKind):
    """Module with a decoder layer of the target's class, over the output of the target's last layer. It shares
    embedding, final norm and lm_head with the target, and these are not trained."""

    mode: ClassVar[str] = "mtp_eagle_one_model"
    head_class: ClassVar[type[nn.Module]] = MtpHead
    keeps_tokens: ClassVar[bool] = False

    @property
    def taps(self) -> tuple[int, ...]:
        return (len(decoder_layers(self.target)[1]) - 1,)

    @cached_property
    def given(self) -> MtpHead | None:
        options = self.options
        return None if options.start in NEW else load_mtp(options.start, self.target).first()

    @property
    def given_form(self) -> str:
        assert self.given is not None
        return repr(self.given.variant)

    def build(self, counts: torch.Tensor, always: Collection[int]) -> MtpHead:
        head = self.given
        if head is None:
            head = MtpHead.random(self.target, 1, self.options.seed)
            _begin(head, self.target, as_target=self.options.start == "target")
        chain = MtpChain(head)
        for own in (head.layers, head.norms):
            own.to(torch.float32).requires_grad_(True)
        # Fail now, not after the target has read the texts.
        chain.check()
        return head

    def training(self, head: nn.Module, teacher: Teacher) -> UnrolledTraining:
        head = cast(MtpHead, head)
        for weight in head.norms[0].parameters():
            self.scale_outputs(weight, teacher)
        chain, ids = MtpChain(head), torch.arange(teacher.weight.shape[0])
        return UnrolledTraining(chain, teacher, ids, unroll=self.options.unroll, decay=self.options.decay)

    def trainable_copy(self, head: nn.Module) -> MtpHead:
        head = cast(MtpHead, head)
        shared = (head.embed_tokens, head.final_norm, head.rotary_emb, head.lm_head)
        own = copy.deepcopy(head, {id(module): module for module in shared})
        for module in (own.layers, own.norms):
            module.to(torch.float32).requires_grad_(True)
        # Fail when the model is wrapped, not in the thread that trains.
        MtpChain(own).check()
        return own

    def save(self, head: nn.Module, folder: Path) -> None:
        save_mtp(cast(MtpHead, head), self.target, folder)


@torch.no_grad()
def _begin(head: MtpHead, target: PreTrainedModel, *, as_target: bool) -> None:
    """Initialise the norms of the inputs. With ``as_target`` also copy parameters of the same name and shape from the
    target's last layer and final norm; the projection then passes on the hidden state."""
    (module,), (norm,) = head.layers, head.norms
    for own in (module.enorm, module.hnorm):
        cast(nn.Module, own).load_state_dict(norm_of(target, head.config).state_dict())
    if not as_target:
        return
    weight = cast(nn.Linear, module.eh_proj).weight
    size = weight.shape[0]
    half = weight[:, :size] if head.variant.hidden_first else weight[:, size:]
    half.add_(torch.eye(size, dtype=half.dtype, device=half.device))
    copies = (
        (cast(nn.Module, module.block), decoder_layers(target)[1][-1]),
        (norm, head.final_norm),
    )
    for own, theirs in copies:
        given = theirs.state_dict()
        for name, tensor in own.state_dict().items():
            if name in given and given[name].shape == tensor.shape:
                tensor.copy_(given[name])


KIND = MtpKind
