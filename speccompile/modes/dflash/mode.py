"""DFlash: a small diffusion head over the target's hidden states drafts a whole block in one forward.

Source: "DFlash: Block Diffusion for Flash Speculative Decoding" (2026, arXiv 2602.06036).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from transformers import PreTrainedModel

from speccompile.graph.step_form import StepForm
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.dflash.checkpoints import can_be_saved, load_dflash
from speccompile.modes.dflash.head import DFlashHead, check_given
from speccompile.modes.dflash.markov_tree import DraftMarkovTree
from speccompile.modes.dflash.network import DFlashNetwork
from speccompile.modes.dflash.passes import DraftBlock, KeepContext
from speccompile.modes.network.head_mode import HeadMode
from speccompile.modes.network.network_mode import SplitMode
from speccompile.modes.network.tree_at_once import DraftTreeAtOnce
from speccompile.passes.base import Pass
from speccompile.passes.step.tap_hidden import Tap
from speccompile.utils.numbers import is_int


@dataclass(frozen=True)
class DFlash(HeadMode, SplitMode):
    """Drafts with a DFlash or DSpark head; K is at most the number of draft tokens of its block.

    Args:
        draft: a :class:`~speccompile.heads.DFlashHead` for this target; or the folder or hub id of a published one.
        draft_max_len: the largest number of tokens of a sequence that the head drafts for. Longer sequences are decoded
            without drafts. None is the head's ``max_position_embeddings``.
        draft_weights: the form of its linears, ``"auto"`` by default; see
            :class:`~speccompile.modes.network.network_mode.NetworkMode`.
        fused: draft inside of the step. False runs separate executables of the drafter before the target's.
        block_size: tokens of a block, at most the head's own block size; None is the head's own. Every tier runs the
            whole block: drafts do not depend on the tier.
    """

    fused: bool = True
    block_size: int | None = None

    name: ClassVar[str] = "dflash"
    one_forward: ClassVar[bool] = True
    drafts_trees: ClassVar[bool] = True

    def check(self, info: ModelInfo) -> None:
        if not isinstance(self.draft, DFlashHead | str | Path) or self.draft == "":
            reason = "give a DFlashHead, the folder of a published one, or its hub id"
            raise self.invalid("draft", type(self.draft).__name__ if self.draft is not None else None, reason)
        size = self.block_size
        if not (size is None or (is_int(size) and size >= 2)):
            raise self.invalid("block_size", size, "it must be an int of at least 2, or None")
        super().check(info)

    def loaded(self, model: PreTrainedModel) -> DFlash:
        if isinstance(self.draft, DFlashHead):
            head = self.draft
            check_given(head, model)
        else:
            head = load_dflash(self.draft, model)
        most, size = head.config.block_size, self.block_size
        if size is not None and size > most:
            raise self.invalid("block_size", size, f"it must be at most {most}, the head's own block size")
        return replace(self, draft=head if size is None else head.with_block(size))

    @property
    def most_drafts(self) -> int | None:
        return self.draft.config.most_drafts if isinstance(self.draft, DFlashHead) else None

    def network(self, model: PreTrainedModel, info: ModelInfo, max_len: int) -> DFlashNetwork:
        most = self.draft_max_len or self.draft.config.max_position_embeddings
        longest = min(most, max_len)
        return DFlashNetwork(self.draft.for_texts(longest), info, longest, self.draft_form)

    def drafting(self, form: StepForm) -> list[Pass]:
        config, tree = self.draft.config, form.tree
        names = ("block_size", "mask_token_id", "sample_from_anchor", "markov_rank")
        sizes = {name: getattr(config, name) for name in names} | {"selects": config.selector_rank > 0}
        sizes["corrects_from"] = config.pure_draft_prefix_len if config.gru_hidden_dim else None
        if tree is None:
            return [DraftBlock(*form.chain, **sizes)]
        block = DraftBlock(tree.depth, form.draws, form.probabilities, **sizes)
        if config.follows_drafts:
            return [DraftMarkovTree(tree, form.draws, form.probabilities, block=block)]
        return [DraftTreeAtOnce(tree, block)]

    @property
    def taps(self) -> tuple[Tap, ...]:
        last = self.draft.layers_of_target - 1
        return tuple(Tap(tap, post_norm=tap == last) for tap in self.draft.config.taps)

    @property
    def learns_from(self) -> tuple[int, ...] | None:
        if not isinstance(self.draft, DFlashHead) or not self.draft.config.trainable:
            return None
        # Unlike other layers, the last one is read after the final norm.
        reads_last = self.draft.layers_of_target - 1 in self.draft.config.taps
        return None if reads_last or not can_be_saved(self.draft) else self.draft.config.taps

    def after_commit(self, form: StepForm) -> list[Pass]:
        return [KeepContext()]

    def explain(self) -> str:
        if not isinstance(self.draft, DFlashHead):
            return f"the DFlash head {self.draft} drafts"
        config = self.draft.config
        layers = ", ".join(str(tap) for tap in config.taps)
        kind = "DFlash head with a Markov term" if config.markov_rank else "DFlash head"
        kind = "Domino head" if config.gru_hidden_dim else kind
        kind = "DFlash2 head" if config.conv_kernel_size or config.selector_rank else kind
        return f"a {kind} over the outputs of layers {layers} drafts {config.most_drafts} tokens in one forward"
