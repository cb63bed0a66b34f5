"""What a wrap is to consist of: its executables, their sizes, and the passes that make each of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from speccompile.acceptance import Exact, Rule
from speccompile.acceptance.forced import FillDrafts
from speccompile.graph.keys import ChunkKind, Kind
from speccompile.graph.state import (
    K,
    KVShape,
    Layout,
    N,
    StateSpec,
    V,
    core_state,
    kv_state,
    recorded_state,
    resolve_layout,
)
from speccompile.graph.step_graph import Route
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.hidden_states.options import SavedRows
from speccompile.lowering.backends import Backend
from speccompile.lowering.kernels import STOCK, Kernels
from speccompile.modes.auto import Choice
from speccompile.modes.base import Mode, proposal_state
from speccompile.modes.network.draft_network import DraftNetwork, with_drafter
from speccompile.modes.network.split import PROBABILITIES, DropTarget, ReadStoredDrafts
from speccompile.ops.cpu.packing import WeightForm, WeightPacks
from speccompile.passes.base import Facts, Pass, facts
from speccompile.passes.native.choose_sampling import ChooseSampling
from speccompile.passes.native.choose_step_ops import ChooseCommit, ChooseDrafting
from speccompile.passes.native.step_ops import UseStepOps
from speccompile.passes.pipeline import Pipeline
from speccompile.passes.step.advance_guide import AdvanceGuide, CutDrafts
from speccompile.passes.step.commit import Commit
from speccompile.passes.step.drafts import LimitDrafts, NoDrafts
from speccompile.passes.step.last_logits import LastLogits
from speccompile.passes.step.mixed import BindMixedRows, MixedInputs
from speccompile.passes.step.record_prompt import RecordPrompt
from speccompile.passes.step.record_scores import RecordLogprobs, RecordScores
from speccompile.passes.step.rows import BindRows
from speccompile.passes.step.save_hidden import MarkSaved, SaveHidden
from speccompile.passes.step.skip_logits import SkipLogits
from speccompile.passes.step.verify_inputs import PrefillInputs, VerifyInputs
from speccompile.passes.target.bound_positions import BoundPositions
from speccompile.passes.target.choose_attention import ChooseAttention, KeepAttention
from speccompile.passes.target.choose_linear import KeepLinears, PackLinears
from speccompile.passes.target.join_linears import JoinLinears
from speccompile.passes.target.outline import OutlineLayers
from speccompile.sampling import sampling_state
from speccompile.sampling.user import UserProcessor

PREFILL_WIDTHS = (4, 8, 16, 32, 64, 128, 512)
# Prompt tokens that a mixed step reads along, about. On a CPU they cost little beside the weights, which are read
# anyway; of twice as many, behind a long context, attention alone would take as long as the step.
MIXED_TOKENS = 8


@dataclass(frozen=True)
class BuildConfig:
    """What ``wrap`` was asked for, checked, and by which means it can be had.

    ``deterministic`` None asks for it where it costs nothing; ``route`` is known when the model has been observed;
    ``network`` is the mode's own, ``saved`` what is kept of each position to be saved, and ``choice`` is by which
    ``mode="auto"`` came to the mode. ``max_len_reason`` is empty where the caller gave ``max_len``.
    """

    mode: Mode
    tiers: tuple[int, ...]
    max_batch: int
    max_len: int
    backend: Backend
    deterministic: bool | None
    kernels: Kernels = STOCK
    weights: WeightForm = "same"
    route: Route | None = None
    rule: Rule = field(default_factory=Exact)
    logits_processors: tuple[UserProcessor, ...] = ()
    scores: bool = False
    network: DraftNetwork | None = None
    saved: SavedRows | None = None
    choice: Choice | None = None
    max_len_reason: str = ""

    @property
    def kind(self) -> Kind:
        """What requests run that ask for nothing: the user's own processors hold for them too."""
        return "sampled" if self.logits_processors else "greedy"

    @property
    def row_fixed(self) -> bool:
        """All kernels keep a row's order of sums, whatever is computed beside it."""
        return self.kernels.native and self.route == "attention"

    @property
    def one_shape(self) -> bool:
        """All tiers run one shape, which makes up for kernels that do not."""
        return self.deterministic is True and not self.row_fixed

    @property
    def reads_dead_places(self) -> bool:
        """Attention reads places of a slot that its text has not reached, too, and hides them."""
        routes = [self.route, *([] if self.network is None else [self.network.route])]
        return self.one_shape or "eager" in routes

    @property
    def keeps_bits(self) -> bool:
        """A context's logits are the same in every bit, wherever they are computed."""
        return self.one_shape or (self.row_fixed and self.deterministic is not False)

    @property
    def max_draft_len(self) -> int:
        return max(self.tiers)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Row counts of the executables: a step runs the smallest that holds its live rows."""
        return (self.max_batch,) if self.one_shape else row_counts(self.max_batch)

    def width(self, draft_len: int) -> int:
        """Verify width T of a tier."""
        return (self.max_draft_len if self.one_shape else draft_len) + 1

    def draft_passes(self, draft_len: int, kind: Kind) -> list[Pass]:
        """What the mode puts into a tier."""
        if not draft_len:
            return [NoDrafts(), *self.commit_passes(kind)]
        mode = self.mode
        if mode.split:
            drafts: list[Pass] = [ReadStoredDrafts(draft_len, self.stores_probabilities and kind != "greedy")]
        elif kind == "greedy":
            drafts = mode.draft_passes(draft_len)
        else:
            drafts = mode.sampled_draft_passes(draft_len, probabilities=self.rule.uses_draft_probs)
        fill: list[Pass] = [FillDrafts(draft_len)] if self.rule.fills_drafts else []
        limited = any("drafts_limited" in item.provides for item in drafts)
        limit: list[Pass] = [] if limited else [LimitDrafts()]
        return [*drafts, *fill, *limit, *self.commit_passes(kind)]

    def choice_passes(self, kind: Kind) -> list[Pass]:
        """From logits to accepted tokens, by the rule; and what is recorded of that."""
        kernels = ChooseSampling(self.kernels.native)
        if kind != "scored":
            return [*self.rule.passes(kind), kernels]
        keep: list[Pass] = [RecordScores()] if self.scores else []
        return [*keep, *self.rule.passes("sampled"), RecordLogprobs(), kernels]

    def commit_passes(self, kind: ChunkKind) -> list[Pass]:
        """What happens behind a commit: what the mode does, unless no tier could use it, and what guides do."""
        mode = self.mode.commit_passes() if self.max_draft_len else []
        if self.kernels.native:
            proposes = bool(mode) and "proposed" in self.mode.goals
            mode = [*mode, ChooseCommit(), *[ChooseDrafting()] * proposes]
        if kind in ("greedy", "inner"):
            return mode
        cut: list[Pass] = [CutDrafts()] if self.cuts_drafts else []
        return [*mode, AdvanceGuide(), *cut]

    @property
    def stores_probabilities(self) -> bool:
        """A split drafter hands over what its drafts were drawn from."""
        return self.mode.split and self.mode.draft_probs and self.rule.uses_draft_probs

    @property
    def cuts_drafts(self) -> bool:
        """Proposals wait in state for the next step, so that what a guide does not allow can be left out."""
        return "proposed" in self.mode.goals and self.max_draft_len > 0 and not self.rule.fills_drafts

    def goals(self, kind: ChunkKind) -> Facts:
        """Facts that hold in a finished step or prompt chunk."""
        goals = facts("committed") | (self.mode.goals if self.max_draft_len else facts())
        goals |= facts(*["hidden_saved"] * (self.saved is not None))
        if kind != "inner":
            goals |= facts("sampling_chosen")
        if kind not in ("greedy", "inner"):
            goals |= facts("guide_advanced", *["drafts_cut"] * self.cuts_drafts)
        if kind in ("scored", "prompt_scored"):
            goals |= facts("logprobs_recorded", *["scores_recorded"] * self.scores)
        return goals | facts("prompt_recorded") if kind == "prompt_scored" else goals

    @property
    def mixes(self) -> bool:
        """A prompt can be read along with the rows of a decode step: attention reads each row's live places alone, and
        it makes no difference to the text which step reads the prompt's last token."""
        mixable = self.route == "attention" and not self.one_shape and self.rule.text_invariant
        # The executables of a split drafter read no prompt along.
        return mixable and not self.mode.split

    @property
    def mixed_row_counts(self) -> tuple[int, ...]:
        """Row counts of mixed steps, in which one slot belongs to the prompt."""
        live = range(1, self.max_batch)
        return tuple(sorted({min(rows for rows in self.row_counts if rows >= wanted) for wanted in live}))

    def prompt_rows(self, draft_len: int) -> int:
        """Rows of a mixed step's target that read a prompt, as wide as the others."""
        return max(1, MIXED_TOKENS // self.width(draft_len))

    @property
    def max_width(self) -> int:
        return self.max_draft_len + 1

    def saved_around(self, *passes: Pass) -> list[Pass]:
        """``passes``, and what is kept of the positions that the target reads: marked in front of them, since they may
        leave some out for the lm_head, and read behind them, since they look for who reads the final norm's output."""
        if self.saved is None:
            return list(passes)
        return [MarkSaved(self.saved.taps), *passes, SaveHidden(SavedRows.STATE)]


def model_pipeline(config: BuildConfig, packs: WeightPacks) -> Pipeline:
    """Passes over the captured model alone; all tiers start from what they leave."""
    attention: Pass = KeepAttention()
    if config.route == "attention":
        stock = ChooseAttention("attention_fixed_order" if config.one_shape else "attention")
        attention = ChooseAttention("native_attention") if config.kernels.native else stock
    linears: tuple[Pass, ...] = (PackLinears(packs), JoinLinears()) if config.kernels.native else (KeepLinears(),)
    step_ops: list[Pass] = [UseStepOps()] if config.kernels.step_ops else []
    passes = (BoundPositions(), attention, *linears, *step_ops, OutlineLayers())
    return Pipeline(passes, facts("outlined"), "the captured model")


def tier_name(draft_len: int, rows: int, kind: Kind = "greedy") -> str:
    return f"tier K={draft_len}, {rows} row{'s' * (rows > 1)}{_of_kind(kind)}"


def mixed_name(draft_len: int, rows: int, kind: Kind = "greedy") -> str:
    return f"mixed {tier_name(draft_len, rows, kind)}"


def prefill_name(width: int, kind: ChunkKind = "greedy") -> str:
    return f"prefill T={width}{_of_kind(kind)}"


def _of_kind(kind: ChunkKind) -> str:
    return "" if kind == "greedy" else f", {kind}"


def tier_pipeline(config: BuildConfig, draft_len: int, rows: int, kind: Kind = "greedy") -> Pipeline:
    """Passes that make the step of one tier out of the outlined model."""
    passes: list[Pass] = [
        BindRows(rows),
        *config.draft_passes(draft_len, kind),
        *config.saved_around(VerifyInputs(draft_len, config.width(draft_len))),
        *config.choice_passes(kind),
        Commit(),
    ]
    return Pipeline(tuple(passes), config.goals(kind), tier_name(draft_len, rows, kind))


def mixed_pipeline(config: BuildConfig, draft_len: int, rows: int, kind: Kind = "greedy") -> Pipeline:
    """Passes that make the step of one tier with a piece of a prompt beside its rows."""
    passes: list[Pass] = [
        BindMixedRows(rows, config.prompt_rows(draft_len), config.width(draft_len)),
        *config.draft_passes(draft_len, kind),
        *config.saved_around(MixedInputs(draft_len)),
        *config.choice_passes(kind),
        Commit(),
    ]
    return Pipeline(tuple(passes), config.goals(kind), mixed_name(draft_len, rows, kind))


def prefill_pipeline(config: BuildConfig, width: int, kind: ChunkKind = "greedy") -> Pipeline:
    """Passes that make a prefill chunk of ``width`` tokens out of the outlined model."""
    inputs: list[Pass] = [PrefillInputs(width)]
    if kind == "inner":
        ends: list[Pass] = [SkipLogits()]
    elif kind == "prompt_scored":
        inputs, ends = [*inputs, LastLogits()], [*config.choice_passes("scored"), RecordPrompt(), Commit()]
    else:
        inputs, ends = [*inputs, LastLogits()], [*config.choice_passes(kind), Commit()]
    start = (BindRows(1, "prefill_slot"), NoDrafts())
    passes = (*start, *config.saved_around(*inputs), *ends, *config.commit_passes(kind))
    return Pipeline(passes, config.goals(kind), prefill_name(width, kind))


def drafter_pipeline(config: BuildConfig, draft_len: int, rows: int, kind: Kind = "greedy") -> Pipeline | None:
    """Passes that make what a split drafter runs in front of a tier; None if it runs nothing there."""
    draws = kind != "greedy"
    own = config.mode.drafter_passes(draft_len, draws=draws, probabilities=draws and config.stores_probabilities)
    goals = _split_goals(config) | facts(*["drafts_stored"] * (draft_len > 0))
    name = f"drafter of {tier_name(draft_len, rows, kind)}"
    return Pipeline((BindRows(rows), *own, DropTarget()), goals, name) if own else None


def drafter_chunk_pipeline(config: BuildConfig, width: int) -> Pipeline | None:
    """Passes that make what a split drafter runs in front of a prompt's chunk, of any kind; None as above."""
    own = config.mode.drafter_chunk_passes(width)
    passes = (BindRows(1, "prefill_slot"), *own, DropTarget())
    return Pipeline(passes, _split_goals(config), f"drafter of {prefill_name(width)}") if own else None


def _split_goals(config: BuildConfig) -> Facts:
    """What the target's executables do not make the drafter read, its own do."""
    return facts("target_dropped") | (facts("drafter_read") - config.mode.goals)


def row_counts(max_batch: int) -> tuple[int, ...]:
    """Powers of two below ``max_batch``, and that."""
    return (*itertools.takewhile(lambda rows: rows < max_batch, (2**power for power in itertools.count())), max_batch)


def prefill_widths(max_len: int) -> tuple[int, ...]:
    """Chunk widths worth having for prompts shorter than ``max_len``."""
    return tuple(width for width in PREFILL_WIDTHS if width == PREFILL_WIDTHS[0] or width <= max_len)


def split_state(config: BuildConfig) -> list[StateSpec]:
    """What a split drafter leaves for the target's executable."""
    if not config.mode.split:
        return []
    probabilities = [StateSpec(PROBABILITIES, (N, K, V), torch.float32)]
    return [*proposal_state(), *probabilities * config.stores_probabilities]


def plan_layout(info: ModelInfo, config: BuildConfig, kv: Mapping[int, KVShape]) -> Layout:
    """All state tensors of the wrap, with their sizes."""
    recorded = recorded_state(info.vocab_size, prefill_widths(config.max_len)[-1], scores=config.scores)
    layout = resolve_layout(
        [
            *core_state(info.vocab_size),
            *sampling_state(),
            *recorded,
            *config.mode.state(),
            *split_state(config),
            *config.rule.state(),
            *([] if config.saved is None else config.saved.state()),
            *kv_state(kv),
        ],
        max_batch=config.max_batch,
        max_len=config.max_len,
        max_draft_len=config.max_draft_len,
        max_width=config.max_width,
        vocab_size=info.vocab_size,
    )
    return layout if config.network is None else with_drafter(layout, config.network)
