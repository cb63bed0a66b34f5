"""Training of heads that draft a block in one forward.

Source: "DFlash" (2026, arXiv 2602.06036), section 4: blocks after random tokens of a text, and a loss with larger
weights for the first draft tokens; SpecForge, ``OnlineDFlashModel``; "DSpark" (2026, arXiv 2607.05147) for the Markov
term and the loss of total variation.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from speccompile.heads import DFlashHead
from speccompile.sampling.draft_vocab import target_ids
from speccompile.training.acceptance import DraftCounts
from speccompile.training.block_attention import BlocksAttention
from speccompile.training.draft_vocab import TargetOverDrafts
from speccompile.training.losses import less_memory, pace_weights, total_variation
from speccompile.training.teacher import TargetStates, Teacher

#: Multiples of this number modulo 1: any number of first positions in this order is spread evenly.
GOLDEN = 0.6180339887498949


class BlockTraining(nn.Module):
    """Module of a DFlash head and its loss.

    A block starts with the token at position a of a text, and drafts the tokens at a + 1, a + 2, ... from the target's
    hidden states before a. The loss of draft i compares its distribution with the target's after position a + i - 1,
    over the draft vocabulary, where the target's choice is in that vocabulary. Blocks start at random positions in
    training, and at evenly spread ones in eval mode. A Markov term reads the text's own token before each draft.

    Args:
        head: its own modules are trained. Modules that it shares with the target are not submodules here.
        teacher: computes hidden states that are missing in a batch.
        blocks: largest number of blocks of a text and step.
        decay: weight of a draft relative to the one before; None for the weights of :func:`pace_weights`.
        variation: share of :func:`total_variation` in the loss; the rest is cross entropy.
        seed: seed of the positions at which blocks start.
    """

    steps: torch.Tensor

    def __init__(
        self, head: DFlashHead, teacher: Teacher, *, blocks: int, decay: float | None, variation: float, seed: int
    ) -> None:
        super().__init__()
        self.fc, self.hidden_norm, self.layers, self.norm = head.fc, head.hidden_norm, head.layers, head.norm
        if head.d2t is not None:
            self.lm_head = head.lm_head
        if head.config.markov_rank:
            self.markov_head = head.markov_head
        self._shared, self._teacher = (head,), teacher
        self._blocks, self._decay, self._variation, self._seed = blocks, decay, variation, seed
        self.targets = None if head.d2t is None else TargetOverDrafts(teacher, target_ids(head.d2t))
        #: Number of training steps so far, as the seed of positions. Unlike torch's random state, it does not depend on
        #: evaluations and interruptions.
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=teacher.weight.device))

    def forward(
        self,
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        texts: torch.Tensor | None = None,
        tapped: torch.Tensor | None = None,
        final: torch.Tensor | None = None,
        choices: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Compute the loss of a batch, see :class:`~speccompile.training.batches.Batches`.

        Returns:
            ``loss``, and in eval mode ``counts`` int64 ``[1, 2, K]``, numbers of accepted and judged drafts by
            position.
        """
        head, width = self._shared[0], input_ids.shape[1]
        states = self._teacher.states(input_ids, tapped, final, choices)
        starts, rows = self._starts(loss_mask)
        left = self._drafts(head, input_ids, states, starts)
        texts_of = torch.arange(len(input_ids), device=input_ids.device)[:, None].expand_as(starts)
        counts, anchor = DraftCounts(), head.config.sample_from_anchor
        # By draft, of all blocks ``[B, N]``.
        losses: list[torch.Tensor] = []
        divergences: list[torch.Tensor] = []
        judged: list[torch.Tensor] = []
        for draft in range(1, head.config.most_drafts + 1):
            place = starts + draft
            rows = rows & (place < width)
            place = place.clamp(max=width - 1)
            rows = rows & loss_mask[texts_of, place]
            before = (texts_of, place - 1)
            normed, tokens = left[:, :, draft - anchor][rows], input_ids[before][rows]
            final_before = states.final[before][rows]
            if self.training:
                columns = len(self._teacher.weight if self.targets is None else self.targets.weight)
                found = less_memory(self._losses, normed, tokens, final_before, columns=columns)
            else:
                logits = self._logits(normed, tokens)
                found = self._of_logits(logits, final_before)
                drafts = torch.full_like(starts, -1)
                drafts[rows] = logits.argmax(-1) if self.targets is None else self.targets.ids[logits.argmax(-1)]
                counts.add(rows, drafts, states.choices[before], input_ids[texts_of, place])
            known = rows if self.targets is None else rows & (self.targets.draft_ids[states.choices[before]] >= 0)
            for whole, column in zip((losses, divergences), found.unbind(-1), strict=True):
                whole.append(torch.zeros_like(starts, dtype=column.dtype).masked_scatter(rows, column))
            judged.append(known)
        loss = self._weighted(*(torch.stack(part, -1) for part in (losses, divergences, judged)))
        return {"loss": loss} if self.training else {"loss": loss, "counts": counts.total()[None]}

    def _weighted(self, losses: torch.Tensor, divergences: torch.Tensor, judged: torch.Tensor) -> torch.Tensor:
        """Loss of losses ``[B, N, K]``: for each draft the weighted mean over blocks, and their sum."""
        if self._decay is None:
            weights = pace_weights(divergences, judged)
        else:
            weights = self._decay ** torch.arange(losses.shape[-1], device=losses.device) * judged
        return ((weights * losses).sum((0, 1)) / judged.sum((0, 1)).clamp(min=1)).sum()

    def _starts(self, loss_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions ``[B, N]`` at which blocks start, and bool ``[B, N]``, whether each has a draft to learn. The token
        and the first draft must be tokens to learn from, as for heads that draft in a chain."""
        width, device = loss_mask.shape[1], loss_mask.device
        learnt = loss_mask.clone()
        # Without a token before it the first token has no context.
        learnt[:, 0] = False
        learnt[:, :-1] &= loss_mask[:, 1:]
        learnt[:, -1] = False
        if self.training:
            generator = torch.Generator().manual_seed(self._seed * 2**32 + int(self.steps))
            order = torch.rand(learnt.shape, generator=generator).to(device)
            self.steps += 1
        else:
            order = (torch.arange(width, device=device) * GOLDEN % 1).expand(learnt.shape)
        count = min(self._blocks, max(int(learnt.sum(1).max()), 1))
        starts = order.masked_fill(~learnt, 2.0).topk(count, largest=False).indices
        return starts, learnt.gather(1, starts)

    def _drafts(
        self, head: DFlashHead, input_ids: torch.Tensor, states: TargetStates, starts: torch.Tensor
    ) -> torch.Tensor:
        """Output of the head's norm at the positions of each block, ``[B, N, block, M]``."""
        size, device, dtype = head.config.block_size, input_ids.device, head.fc.weight.dtype
        blocks = torch.full((*starts.shape, size), head.config.mask_token_id, device=device)
        blocks[:, :, 0] = input_ids.gather(1, starts)
        positions = starts[:, :, None] + torch.arange(size, device=device)
        context = head.context(states.tapped.to(dtype))
        known = head.context_kv(context, torch.arange(input_ids.shape[1], device=device).expand_as(input_ids))
        with torch.no_grad():
            embedded = head.embed(blocks.flatten(1)).to(dtype)
        left = head.read(embedded, positions.flatten(1), BlocksAttention(known, starts))
        normed: torch.Tensor = head.norm(left)
        return normed.unflatten(1, (starts.shape[1], size))

    def _logits(self, normed: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Logits ``[R, Vd]``, float32, of outputs ``[R, M]`` and the tokens before the drafts, ``[R]``."""
        head, teacher = self._shared[0], self._teacher
        if self.targets is None:
            logits = F.linear(normed.to(teacher.weight.dtype), teacher.weight, teacher.bias)
        else:
            logits = head.lm_head(normed)
        return logits.float() + head.markov_head(before).float() if head.config.markov_rank else logits.float()

    def _losses(self, normed: torch.Tensor, before: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
        return self._of_logits(self._logits(normed, before), final)

    def _of_logits(self, logits: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
        """Losses of rows and their divergences, ``[R, 2]``, of logits ``[R, Vd]`` and the target's hidden states ``[R,
        M]`` before the drafts."""
        probs = (self._teacher if self.targets is None else self.targets).probs(final)
        entropy = logits.logsumexp(-1) - (probs * logits).sum(-1)
        loss = entropy
        if self._variation:
            loss = self._variation * total_variation(logits, probs) + (1 - self._variation) * entropy
        divergence = entropy.detach() - torch.special.entr(probs).sum(-1)
        return torch.stack([loss, divergence], -1)
