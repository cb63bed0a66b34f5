"""EAGLE-3 heads: initialisation, training and saving."""

from __future__ import annotations

import copy
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.errors import InvalidHead, InvalidOption
from speccompile.graph_capture.model_info import decoder_layers
from speccompile.heads import Eagle3Config, Eagle3Head, default_taps, load_eagle3, save_eagle3
from speccompile.hidden_states.target_id import target_id
from speccompile.sampling.draft_vocab import target_ids
from speccompile.training.beginnings import final_scale, layer_weights
from speccompile.training.draft_vocab import default_size, most_frequent
from speccompile.training.kinds import NEW, HeadKind
from speccompile.training.teacher import Teacher
from speccompile.training.unrolled import UnrolledTraining


class Eagle3Kind(HeadKind):
    """Head of one layer of the target's sizes over three of its layers. It shares the embedding, which is not
    trained."""

    mode: ClassVar[str] = "eagle3_one_model"
    head_class: ClassVar[type[nn.Module]] = Eagle3Head

    @property
    def taps(self) -> tuple[int, ...]:
        if self.given is not None:
            return self.given.config.taps
        count, given = len(decoder_layers(self.target)[1]), self.options.layers
        if given is None and count <= 5:
            reason = f"the usual three layers need a target of more than 5, and this one has {count}; name some"
            raise InvalidOption(where="train_head", name="layers", value=None, reason=reason)
        taps = default_taps(count) if given is None else tuple(given)
        if taps[-1] >= count:
            reason = f"they must be among the target's layers 0 .. {count - 1}"
            raise InvalidOption(where="train_head", name="layers", value=list(taps), reason=reason)
        return taps

    @cached_property
    def given(self) -> Eagle3Head | None:
        options = self.options
        if options.start in NEW:
            return None
        for name in ("draft_vocab", "layers"):
            if (value := getattr(options, name)) is not None:
                reason = f"the head {options.start} has its own {name}; leave it out"
                raise InvalidOption(where="train_head", name=name, value=value, reason=reason)
        head = load_eagle3(options.start, self.target).float()
        if not head.config.trainable:
            reason = "it must have one layer without a sliding window, and draft in a chain; start from another head"
            raise InvalidHead(source=options.start, reason=reason)
        if not head.config.taps:
            head = head.with_taps(default_taps(len(decoder_layers(self.target)[1])))
        for name, parameter in head.named_parameters():
            parameter.requires_grad_(not name.startswith("embed_tokens."))
        return head

    @property
    def given_form(self) -> str:
        assert self.given is not None
        return repr(self.given.config)

    def build(self, counts: torch.Tensor, always: Collection[int]) -> Eagle3Head:
        if self.given is not None:
            return self.given
        vocab = len(counts)
        size = self.options.draft_vocab or default_size(vocab)
        if size > vocab:
            reason = f"it must be at most the {vocab} tokens of the target's vocabulary"
            raise InvalidOption(where="train_head", name="draft_vocab", value=size, reason=reason)
        text = self.target.config.get_text_config(decoder=True)
        config = Eagle3Config.for_target(
            self.target,
            draft_vocab_size=size,
            taps=self.taps,
            max_position_embeddings=getattr(text, "max_position_embeddings", None) or 2048,
            rms_norm_eps=getattr(text, "rms_norm_eps", None) or 1e-6,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.options.seed)
            head = Eagle3Head(config)
        ids = torch.arange(vocab) if size == vocab else most_frequent(counts, size, always)
        if head.d2t is not None:
            head.d2t = ids - torch.arange(size)
        if self.options.start == "target":
            _begin_as_target(head, self.target, ids)
        embedding: Any = self.target.get_input_embeddings()
        if tuple(embedding.weight.shape) != (vocab, config.hidden_size):
            reason = f"the target's embedding is {list(embedding.weight.shape)}, which a head cannot share"
            raise InvalidHead(source="EAGLE-3", reason=reason)
        head = head.to(self.target.device, torch.float32)
        head.share(embedding=embedding.weight.float())
        return head

    def training(self, head: nn.Module, teacher: Teacher) -> UnrolledTraining:
        head = cast(Eagle3Head, head)
        self.scale_outputs(cast(torch.Tensor, head.lm_head.weight), teacher)
        d2t = head.d2t
        ids = torch.arange(teacher.weight.shape[0]) if d2t is None else target_ids(d2t)
        return UnrolledTraining(head, teacher, ids, unroll=self.options.unroll, decay=self.options.decay)

    def trainable_copy(self, head: nn.Module) -> Eagle3Head:
        head = cast(Eagle3Head, head)
        shared = head.embed_tokens.weight
        frozen = nn.Parameter(shared.detach().float(), requires_grad=False)
        own = copy.deepcopy(head, {id(shared): frozen} if head.shares_embedding else {}).float()
        for name, parameter in own.named_parameters():
            parameter.requires_grad_(not name.startswith("embed_tokens."))
        return own

    def save(self, head: nn.Module, folder: Path) -> None:
        layout: Any = self.options.layout
        name, noted = type(self.target).__name__, target_id(self.target)
        save_eagle3(cast(Eagle3Head, head), folder, layout=layout, target=name, target_id=noted)


@torch.no_grad()
def _begin_as_target(head: Eagle3Head, target: PreTrainedModel, ids: torch.Tensor) -> None:
    """Copy parameters of the same name and shape from the target's last layer, final norm and lm_head. Attention
    projections read [embedding, hidden state]; the target's are copied to the half of the hidden state."""
    lm_head: Any = target.get_output_embeddings()
    late = head.config.target_hidden_size
    if late == head.config.hidden_size:
        head.fc.weight[:, -late:].add_(torch.eye(late))
    cast(torch.Tensor, head.lm_head.weight).copy_(lm_head.weight[ids.to(lm_head.weight.device)])
    last = layer_weights(decoder_layers(target)[1][-1])
    own = dict(head.layers[0].named_parameters())
    for name, parameter in own.items():
        given = last.get({"hidden_norm.weight": "input_layernorm.weight"}.get(name, name))
        if given is None or name == "input_layernorm.weight":
            continue
        if given.shape == parameter.shape:
            parameter.copy_(given)
        elif given.ndim == 2 and (given.shape[0], 2 * given.shape[1]) == tuple(parameter.shape):
            parameter[:, given.shape[1] :].copy_(given)
    final = final_scale(target)
    if final is not None and final.shape == head.norm.weight.shape:
        head.norm.weight.copy_(final)


KIND = Eagle3Kind
