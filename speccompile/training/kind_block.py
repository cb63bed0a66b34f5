"""DFlash heads: initialisation, training and saving."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.errors import InvalidHead, InvalidOption
from speccompile.graph_capture.model_info import decoder_layers
from speccompile.heads import DFlashConfig, DFlashHead, load_dflash, save_dflash
from speccompile.hidden_states.target_id import target_id
from speccompile.modes.dflash.checkpoints import config_of
from speccompile.modes.dflash.config import spread_taps
from speccompile.modes.dflash.head import SOURCE
from speccompile.modes.dflash.speculators import needs_speculators
from speccompile.sampling.draft_vocab import target_ids
from speccompile.training.beginnings import final_scale, layer_weights
from speccompile.training.blocks import BlockTraining
from speccompile.training.draft_vocab import most_frequent
from speccompile.training.kinds import NEW, HeadKind
from speccompile.training.teacher import Teacher


class BlockKind(HeadKind):
    """Head of ``head_layers`` layers of the target's sizes over up to five of its layers. It shares the embedding with
    the target, and the lm_head unless it has a draft vocabulary; what it shares is not trained."""

    mode: ClassVar[str] = "dflash"
    head_class: ClassVar[type[nn.Module]] = DFlashHead

    @property
    def taps(self) -> tuple[int, ...]:
        if self.given is not None:
            return self.given.config.taps
        count, given = len(decoder_layers(self.target)[1]), self.options.layers
        if given is None:
            # Unlike other layers, the last one is read after the final norm.
            if count < 2:
                raise InvalidHead(
                    source=SOURCE, reason="the target has a single layer, and the head needs one before the last"
                )
            return tuple(tap for tap in spread_taps(count) if tap < count - 1) or (0,)
        if given[-1] >= count - 1:
            reason = f"a block drafter needs layers among 0 .. {count - 2} of this target"
            raise InvalidOption(where="train_head", name="layers", value=list(given), reason=reason)
        return tuple(given)

    @cached_property
    def given(self) -> DFlashHead | None:
        options = self.options
        if options.start in NEW:
            return None
        for name in ("layers", "block_size", "head_layers", "draft_vocab", "markov_rank", "sample_from_anchor"):
            if (value := getattr(options, name)) != options.default_of(name):
                reason = f"the head {options.start} has its own {name}; leave it out"
                raise InvalidOption(where="train_head", name=name, value=value, reason=reason)
        head = load_dflash(options.start, self.target)
        last = len(decoder_layers(self.target)[1]) - 1
        # Fail now if the head cannot be saved.
        config_of(head, "float32")
        if not head.config.trainable or last in head.config.taps:
            reason = "it must have no sliding window and no scale of logits, and not read the target's last layer"
            reason = f"{reason}; start from another head"
            raise InvalidHead(source=options.start, reason=reason)
        for own in head.own:
            own.to(torch.float32).requires_grad_(True)
        return head

    @property
    def given_form(self) -> str:
        assert self.given is not None
        return repr(self.given.config)

    def build(self, counts: torch.Tensor, always: Collection[int]) -> DFlashHead:
        if self.given is not None:
            return self.given
        vocab, size = len(counts), self.options.draft_vocab
        if size is not None and size > vocab:
            reason = f"it must be at most the {vocab} tokens of the target's vocabulary"
            raise InvalidOption(where="train_head", name="draft_vocab", value=size, reason=reason)
        text = self.target.config.get_text_config(decoder=True)
        config = DFlashConfig.for_target(
            self.target,
            mask_token_id=_mask_token(counts, always),
            taps=self.taps,
            block_size=self.options.block_size,
            num_hidden_layers=self.options.head_layers,
            max_position_embeddings=getattr(text, "max_position_embeddings", None) or 2048,
            rms_norm_eps=getattr(text, "rms_norm_eps", None) or 1e-6,
            draft_vocab_size=None if size == vocab else size,
            markov_rank=self.options.markov_rank,
            sample_from_anchor=self.options.sample_from_anchor,
        )
        if needs_speculators(config):
            # That layout has no scale.
            config = replace(config, embedding_scale=1.0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.options.seed)
            head = DFlashHead(config, self.target)
        if head.d2t is not None:
            ids = most_frequent(counts, len(head.d2t), always)
            head.d2t.copy_(ids - torch.arange(len(ids)))
        if self.options.start == "target":
            _begin_as_target(head, self.target)
        if config.markov_rank:
            # At first every bias is 0.
            nn.init.zeros_(head.markov_head.markov_w2.weight)
        # Fail now, not after the training, if the head cannot be saved.
        config_of(head, "float32")
        for own in head.own:
            own.to(torch.float32)
        return head

    def training(self, head: nn.Module, teacher: Teacher) -> BlockTraining:
        head, options = cast(DFlashHead, head), self.options
        self.scale_outputs(head.norm.weight, teacher)
        return BlockTraining(
            head,
            teacher,
            blocks=options.blocks,
            decay=None if options.weights == "pace" else options.decay,
            variation=options.variation,
            seed=options.seed,
        )

    def trainable_copy(self, head: nn.Module) -> DFlashHead:
        head = cast(DFlashHead, head)
        shared = [head.embed_tokens] if head.d2t is not None else [head.embed_tokens, head.lm_head]
        own = copy.deepcopy(head, {id(module): module for module in shared})
        for module in own.own:
            module.to(torch.float32).requires_grad_(True)
        return own

    def save(self, head: nn.Module, folder: Path) -> None:
        save_dflash(cast(DFlashHead, head), folder, target_id=target_id(self.target))


def _mask_token(counts: torch.Tensor, always: Collection[int]) -> int:
    """Choose a mask token: the last among the tokens that are learnt least often and do not end a text."""
    counts = counts.clone()
    counts[[token for token in always if 0 <= token < len(counts)]] += 1
    return int((counts == counts.min()).nonzero()[-1])


@torch.no_grad()
def _begin_as_target(head: DFlashHead, target: PreTrainedModel) -> None:
    """Copy parameters of the same name and shape from the target's last layers and final norm. The projection of the
    context is initialised to pass on the last tapped layer."""
    size = head.config.hidden_size
    if head.d2t is not None:
        lm_head: Any = target.get_output_embeddings()
        cast(torch.Tensor, head.lm_head.weight).copy_(lm_head.weight[target_ids(head.d2t)])
    head.fc.weight[:, -size:].add_(torch.eye(size, dtype=head.fc.weight.dtype, device=head.fc.weight.device))
    layers: list[nn.Module] = list(decoder_layers(target)[1])
    for own, theirs in zip(reversed(head.layers), reversed(layers), strict=False):
        given = layer_weights(theirs)
        for name, parameter in own.named_parameters():
            if name in given and given[name].shape == parameter.shape:
                parameter.copy_(given[name])
    final = final_scale(target)
    if final is not None and final.shape == head.norm.weight.shape:
        head.norm.weight.copy_(final)


KIND = BlockKind
