"""MTP modules drafting without caches, graphs or tiers: what a mode has to draft, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from speccompile.heads import MtpHead
from speccompile.modes.mtp.head import causal_mask
from speccompile.utils.transformers_version import CACHE


def left_by_target(model: PreTrainedModel, text: Sequence[int]) -> torch.Tensor:
    """What the target's last layer leaves at all of a text's tokens but the last, ``[L - 1, M]``."""
    found: list[torch.Tensor] = []
    layer = model.get_decoder().layers[-1]
    handle = layer.register_forward_hook(lambda _module, _inputs, output: found.append(output))
    with torch.no_grad():
        model(torch.tensor([list(text[:-1])]), use_cache=False)
    handle.remove()
    return found[0][0]


def rows(head: MtpHead, module: int, tokens: Sequence[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One module over all of its rows: logits of the last one, and what each carries on. ``hidden`` ``[T, M]``."""
    head.config._attn_implementation_internal = "eager"
    ids = torch.tensor([list(tokens)])
    positions = torch.arange(len(tokens))[None]
    with torch.no_grad():
        embedded = head.embed_tokens(ids)
        left = head.layers[module](
            embedded,
            hidden[None],
            attention_mask=causal_mask(positions, len(tokens), hidden.dtype),
            position_ids=positions,
            position_embeddings=head.rotary_emb(embedded, positions),
            **{CACHE: None},
        )
        normed = head.norms[module](left)
        logits = head.lm_head(normed)[0, -1]
    return logits, (normed if head.variant.normed_carry else left)[0]


def read_by_first(head: MtpHead, left: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return head.final_norm(left) if head.variant.normed_target else left


def draft_by_chain(
    head: MtpHead, text: Sequence[int], left: torch.Tensor, draft_len: int, *, reuse: bool = False
) -> tuple[list[int], torch.Tensor]:
    """As DeepSeek-V3's report has it (``reuse``: the first module for all): draft tokens, and logits ``[K, V]``."""
    tokens, hidden, logits = list(text), read_by_first(head, left), []
    for place in range(draft_len):
        if reuse:
            found, carried = rows(head, 0, tokens[1:], hidden)
            hidden = torch.cat([hidden, carried[-1:]])
        else:
            found, hidden = rows(head, place, tokens[place + 1 :], hidden)
        logits.append(found)
        tokens.append(int(found.argmax()))
    return tokens[len(text) :], torch.stack(logits)


@dataclass
class SeedWorker:
    """TensorRT-LLM's ``MTPWorker`` (``_torch/speculative/mtp.py``), one request, by its docstring's worked example.

    A module is one layer, so its KV at a place depends on the token and the hidden state that it read there: ``cache``.
    Two places where the seed's own KV is undefined are filled in: when all M drafts are accepted, M + 1 tokens are new
    and it reads M of them again, so one place of each module was never written; and after a prompt shorter than M its
    pools hold zeros for tokens that do not exist, at places before the first.
    """

    head: MtpHead
    past_tokens: list[int] = field(default_factory=list)
    past_hidden: list[torch.Tensor] = field(default_factory=list)
    cache: list[dict[int, tuple[int, torch.Tensor]]] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        modules = len(self.head.layers)
        zero = torch.zeros(self.head.hidden_size)
        self.past_tokens, self.past_hidden = [0] * modules, [zero] * modules
        self.cache = [{} for _ in range(modules)]

    def context(self, prompt: Sequence[int], hidden: torch.Tensor, golden: int) -> None:
        """``hidden`` ``[P, M]``: what the target left, after its final norm."""
        self._update_pools(prompt, hidden, len(prompt))
        self._run([*prompt[1:], golden], list(hidden), list(range(len(prompt))))

    def generation(self, read: Sequence[int], hidden: torch.Tensor, accepted: Sequence[int], position: int) -> None:
        """One step.

        Args:
            read: the M + 1 tokens that the target read, from ``position`` on; hidden: what it left there.
            accepted: the n tokens that came of it.
        """
        modules, count = len(self.head.layers), len(accepted)
        self._update_pools(read, hidden, count)
        tokens = [*self.past_tokens[1:], accepted[-1]]
        last = range(position + 1, position + 1 + modules)
        positions = [each - (1 + modules - count) for each in last]
        if count == modules + 1:
            for module, cache in enumerate(self.cache):
                cache[positions[0] - 1] = (accepted[module], hidden[module])
        keep = [index for index, each in enumerate(positions) if each >= 0]
        self._run([tokens[i] for i in keep], [self.past_hidden[i] for i in keep], [positions[i] for i in keep])

    def _update_pools(self, read: Sequence[int], hidden: torch.Tensor, count: int) -> None:
        modules = len(self.head.layers)
        self.past_tokens = [*self.past_tokens, *read][count : count + modules]
        self.past_hidden = [*self.past_hidden, *hidden][count : count + modules]

    def _run(self, tokens: list[int], hidden: list[torch.Tensor], positions: list[int]) -> None:
        self.drafts, self.logits = [], []
        for module, cache in enumerate(self.cache):
            cache |= {place: pair for place, *pair in zip(positions, tokens, hidden, strict=True)}
            places = range(positions[-1] + 1)
            read = [cache[place] for place in places]
            states = torch.stack([state for _, state in read])
            logits, carried = rows(self.head, module, [token for token, _ in read], states)
            self.logits.append(logits)
            self.drafts.append(int(logits.argmax()))
            tokens = [*tokens[1:], self.drafts[-1]]
            hidden = [*hidden[1:], carried[-1]]
