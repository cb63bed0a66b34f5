"""The passes of each executable, in the order in which they run.

Modes and acceptance rules give parts of the lists; the user's own passes stand where their anchors are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from speccompile.acceptance.forced import FillDrafts
from speccompile.compiler.config import BuildConfig
from speccompile.compiler.names import mixed_name, prefill_name, tier_name
from speccompile.graph.keys import ChunkKind, Kind
from speccompile.graph.tree import Tree
from speccompile.hidden_states.options import SavedRows
from speccompile.modes.network.split import DropTarget
from speccompile.ops.cpu.packing import WeightPacks
from speccompile.passes.base import Facts, Pass, facts
from speccompile.passes.native.choose_sampling import ChooseSampling
from speccompile.passes.native.choose_step_ops import ChooseCommit, ChooseDrafting, ChooseTreeOps
from speccompile.passes.native.step_ops import UseStepOps
from speccompile.passes.pipeline import Pipeline
from speccompile.passes.placement import place_passes
from speccompile.passes.ranks.broadcast_choice import BroadcastChoice
from speccompile.passes.ranks.broadcast_drafts import BroadcastDrafts
from speccompile.passes.ranks.broadcast_proposals import BroadcastProposals
from speccompile.passes.ranks.choose_from_shards import ChooseFromShards
from speccompile.passes.step.advance_guide import AdvanceGuide, TruncateDrafts, TruncateTree
from speccompile.passes.step.bind_recurrence import BindRecurrence
from speccompile.passes.step.commit import Commit
from speccompile.passes.step.drafts import LimitDrafts, NoDrafts
from speccompile.passes.step.drawn_accept import TreeDrawnAccept
from speccompile.passes.step.join_inputs import JoinInputs
from speccompile.passes.step.judge_chain import JudgeChain
from speccompile.passes.step.last_logits import LastLogits
from speccompile.passes.step.mixed import BindMixedRows, MixedInputs
from speccompile.passes.step.move_path import FollowPath, MovePath
from speccompile.passes.step.propose_from_hidden import ProposeFromHidden, ProposeTreeFromHidden
from speccompile.passes.step.record_prompt import RecordPrompt
from speccompile.passes.step.record_scores import RecordLogprobs, RecordScores
from speccompile.passes.step.rows import BindRows
from speccompile.passes.step.sample import ProcessLogits
from speccompile.passes.step.save_hidden import MarkSaved, SaveHidden
from speccompile.passes.step.share_subexpressions import ShareSubexpressions
from speccompile.passes.step.skip_logits import SkipLogits
from speccompile.passes.step.tree_accept import JoinScores, TreeExactAccept, TreeGreedyAccept
from speccompile.passes.step.tree_inputs import TreeInputs
from speccompile.passes.step.use_filters import UseFilters
from speccompile.passes.step.verify_inputs import PrefillInputs, VerifyInputs
from speccompile.passes.target.add_adapters import AddAdapters
from speccompile.passes.target.bound_positions import BoundPositions
from speccompile.passes.target.choose_attention import ChooseAttention, KeepAttention, NoAttention
from speccompile.passes.target.choose_experts import ChooseExperts
from speccompile.passes.target.choose_linear import KeepLinears, PackLinears
from speccompile.passes.target.choose_recurrence import ChooseRecurrence
from speccompile.passes.target.join_linears import JoinLinears
from speccompile.passes.target.join_weights import JoinWeights
from speccompile.passes.target.move_norms import MoveNorms
from speccompile.passes.target.outline import OutlineLayers
from speccompile.passes.target.outline_ends import OutlineEnds
from speccompile.passes.target.tree_bodies import AddTreeBodies
from speccompile.passes.target.use_skinny_linears import UseSkinnyLinears
from speccompile.utils.joined_weights import JoinedWeights

#: Requests that follow a guide run none of these.
WITHOUT_GUIDES: tuple[ChunkKind, ...] = ("greedy", "drawn", "inner")

#: The rule ``exact`` on a tree; of the other kinds ``TreeExactAccept``.
_TREE_RULES: dict[Kind, Callable[[Tree], Pass]] = {"greedy": TreeGreedyAccept, "drawn": TreeDrawnAccept}


def model_pipeline(config: BuildConfig, packs: WeightPacks, joined: JoinedWeights | None = None) -> Pipeline:
    """Passes over the captured model alone; all tiers start from the graph that they leave.

    ``joined`` moves its weights; None moves none.
    """
    native = config.kernels.native
    if not config.attends:
        attention: Pass = NoAttention()
    elif config.route != "attention":
        attention = KeepAttention()
    elif native:
        attention = ChooseAttention("native_attention")
    else:
        attention = ChooseAttention("attention_fixed_order" if config.one_shape else "attention")
    passes = [
        BoundPositions(),
        attention,
        *[ChooseRecurrence(native)] * config.recurrent,
        *[ChooseExperts(native)] * config.experts,
        *([] if config.adapters is None else [AddAdapters(config.adapters, native)]),
        *_linears(config, packs),
        *[JoinWeights(joined or JoinedWeights())] * config.kernels.joins_weights,
        *[UseSkinnyLinears()] * config.kernels.skinny_linears,
        *[UseStepOps()] * config.kernels.step_ops,
        *[MoveNorms()] * config.kernels.few_launches,
        OutlineLayers(),
        *[OutlineEnds()] * config.kernels.few_launches,
        *[AddTreeBodies()] * bool(config.trees),
    ]
    return _pipeline(config, passes, facts("outlined"), "the captured model")


def _linears(config: BuildConfig, packs: WeightPacks) -> list[Pass]:
    if config.kernels.native:
        return [PackLinears(packs), JoinLinears()]
    if config.weights.rounds:
        return [PackLinears(packs, rounded_only=True), JoinLinears()]
    return [KeepLinears()]


def tier_pipeline(config: BuildConfig, draft_len: int, rows: int, kind: Kind = "greedy") -> Pipeline:
    """Passes that make the step of one tier out of the outlined model."""
    if isinstance(draft_len, Tree):
        return tree_pipeline(config, draft_len, rows, kind)
    passes = [
        BindRows(rows),
        *_filters(config, kind),
        *_drafts(config, draft_len, kind),
        *_target_inputs(config, VerifyInputs(draft_len, config.width(draft_len)), *_recurrence(config, prompt=False)),
        *_choice(config, kind),
        Commit(),
        *_after_commit(config, kind),
        *[JoinInputs()] * (config.kernels.few_launches and not config.passes),
        ShareSubexpressions(),
    ]
    return _pipeline(config, passes, goals(config, kind), tier_name(draft_len, rows, kind))


def tree_pipeline(config: BuildConfig, tree: Tree, rows: int, kind: Kind = "greedy") -> Pipeline:
    """Passes that make the step of a tier whose drafts are a tree."""
    accept: list[Pass] = [_TREE_RULES.get(kind, TreeExactAccept)(tree)]
    scored, mode = kind == "scored", config.mode
    drafts = mode.tree_read_passes(tree) if mode.split else mode.tree_draft_passes(tree, draws=kind != "greedy")
    saved = config.saved is not None
    reads_path = saved or config.network is not None or mode.drafts_from_hidden
    passes = [
        BindRows(rows),
        *_filters(config, kind),
        *drafts,
        *_broadcast(config),
        *_marks(config),
        TreeInputs(tree),
        *accept,
        *_same_choice(config, kind),
        JudgeChain(tree),
        MovePath(scored),
        *[JoinScores(tree), RecordScores()] * (scored and config.scores),
        *[RecordLogprobs()] * scored,
        *[ChooseTreeOps()] * config.kernels.native,
        ChooseSampling(config.kernels.native),
        Commit(),
        *[FollowPath()] * reads_path,
        *[SaveHidden(SavedRows.STATE)] * saved,
        *_after_commit(config, kind),
        ShareSubexpressions(),
    ]
    return _pipeline(config, passes, goals(config, kind), tier_name(tree, rows, kind))


def mixed_pipeline(config: BuildConfig, draft_len: int, rows: int, kind: Kind = "greedy") -> Pipeline:
    """Passes that make the step of one tier with a piece of a prompt beside its rows."""
    passes = [
        BindMixedRows(rows, config.prompt_rows(draft_len), config.width(draft_len)),
        *_filters(config, kind),
        *_drafts(config, draft_len, kind),
        *_target_inputs(config, MixedInputs(draft_len)),
        *_choice(config, kind),
        Commit(),
        *_after_commit(config, kind),
        ShareSubexpressions(),
    ]
    return _pipeline(config, passes, goals(config, kind), mixed_name(draft_len, rows, kind))


def prefill_pipeline(config: BuildConfig, width: int, kind: ChunkKind = "greedy") -> Pipeline:
    """Passes that make a prefill chunk of ``width`` tokens out of the outlined model."""
    inputs: list[Pass] = [PrefillInputs(width), *_recurrence(config, prompt=True)]
    if kind == "inner":
        choice: list[Pass] = [SkipLogits()]
    elif kind == "prompt_scored":
        inputs += [LastLogits()]
        choice = [*_choice(config, "scored"), RecordPrompt(), Commit()]
    else:
        inputs += [LastLogits()]
        choice = [*_choice(config, kind), Commit()]
    passes = [
        BindRows(1, "prefill_slot"),
        *_filters(config, kind),
        NoDrafts(),
        *_target_inputs(config, *inputs),
        *choice,
        *_after_commit(config, kind),
        ShareSubexpressions(),
    ]
    return _pipeline(config, passes, goals(config, kind), prefill_name(width, kind))


def drafter_pipeline(config: BuildConfig, draft_len: int, rows: int, kind: Kind = "greedy") -> Pipeline | None:
    """Passes that make what a split drafter runs before a tier; None if it runs nothing there."""
    draws = kind != "greedy"
    probabilities = draws and config.stores_probabilities
    if isinstance(draft_len, Tree):
        own = config.mode.tree_drafter_passes(draft_len, draws=draws)
    elif draft_len and config.drafts_in_segments:
        begin = config.drafted_before(draft_len)
        own = config.mode.segment_passes(begin, draft_len, draws=draws, probabilities=probabilities)
    else:
        own = config.mode.drafter_passes(draft_len, draws=draws, probabilities=probabilities)
    goals = _split_goals(config) | facts(*["drafts_stored"] * (draft_len > 0))
    name = f"drafter of {tier_name(draft_len, rows, kind)}"
    native = [ChooseTreeOps()] * (config.kernels.native and isinstance(draft_len, Tree))
    passes = [BindRows(rows), *_filters(config, kind), *own, *native, DropTarget(), ShareSubexpressions()]
    return _pipeline(config, passes, goals, name) if own else None


def drafter_chunk_pipeline(config: BuildConfig, width: int) -> Pipeline | None:
    """Passes that make what a split drafter runs before a prompt's chunk, of any kind; None as above."""
    own = config.mode.drafter_chunk_passes(width)
    passes = [BindRows(1, "prefill_slot"), *own, DropTarget(), ShareSubexpressions()]
    return _pipeline(config, passes, _split_goals(config), f"drafter of {prefill_name(width)}") if own else None


def goals(config: BuildConfig, kind: ChunkKind) -> Facts:
    """Facts that hold in a finished step or prompt chunk."""
    goals = {"committed", "subexpressions_shared", *(config.mode.goals if config.max_draft_len else ())}
    if config.saved is not None:
        goals.add("hidden_saved")
    if config.recurrent:
        goals.add("recurrence_bound")
    if kind != "inner":
        goals.add("sampling_chosen")
    if kind not in WITHOUT_GUIDES:
        goals.add("guide_advanced")
        goals.update(["drafts_truncated"] * config.truncates_drafts)
        goals.update(["tree_truncated"] * config.truncates_trees)
    if kind in ("scored", "prompt_scored"):
        goals.add("logprobs_recorded")
        goals.update(["scores_recorded"] * config.scores)
    if kind == "prompt_scored":
        goals.add("prompt_recorded")
    return frozenset(goals)


# --- parts of the lists --------------------------------------------------------------------------


def _filters(config: BuildConfig, kind: ChunkKind) -> list[Pass]:
    """What lets steps of the kind ``drawn`` do without the other processors."""
    return [UseFilters()] * (kind == "drawn" and config.uses_filters)


def _drafts(config: BuildConfig, draft_len: int, kind: Kind) -> list[Pass]:
    """From rows to drafts and how many of them are judged."""
    if not draft_len:
        return [NoDrafts()]
    mode = config.mode
    if mode.split:
        drafts = mode.read_passes(draft_len, probabilities=config.stores_probabilities and kind != "greedy")
    elif kind == "greedy":
        drafts = mode.draft_passes(draft_len)
    else:
        drafts = mode.sampled_draft_passes(draft_len, probabilities=config.rule.uses_draft_probs)
    limited = any("drafts_limited" in item.provides for item in drafts)
    return [
        *drafts,
        *[FillDrafts(draft_len)] * config.rule.fills_drafts,
        *[LimitDrafts()] * (not limited),
        *_broadcast(config),
    ]


def _broadcast(config: BuildConfig) -> list[Pass]:
    """Drafts of a network are the first rank's, its own or the target's layers. Others follow from tokens alone, which
    are equal on all ranks."""
    ranks, drafted = config.ranks, config.network is not None or config.mode.runs_target_layers
    return [BroadcastDrafts(ranks.name, ranks.size)] if ranks is not None and drafted else []


def _same_choice(config: BuildConfig, kind: Kind) -> list[Pass]:
    """All ranks choose the same; without the logits of other ranks where no processor needs them."""
    ranks = config.ranks
    if ranks is None:
        return []
    own_probs = config.rule.uses_draft_probs and config.network is not None and kind != "greedy"
    passes: list[Pass] = [BroadcastChoice(ranks.name, ranks.size, own_probs)]
    return [*passes, ChooseFromShards(ranks.rank)] if kind in ("greedy", "drawn") else passes


def _same_proposals(config: BuildConfig, passes: Sequence[Pass]) -> list[Pass]:
    """Proposals from hidden states are the first rank's, as drafts of a network are."""
    ranks = config.ranks
    from_hidden = any(isinstance(item, ProposeFromHidden | ProposeTreeFromHidden) for item in passes)
    return [BroadcastProposals(ranks.name, ranks.size)] if ranks is not None and from_hidden else []


def _marks(config: BuildConfig) -> list[Pass]:
    """Values of the target are marked before its inputs are bound, which may leave some positions out for the
    lm_head."""
    marks = config.mode.mark_passes() if config.max_draft_len else []
    return [*marks, *([] if config.saved is None else [MarkSaved(config.saved.taps)])]


def _target_inputs(config: BuildConfig, *inputs: Pass) -> list[Pass]:
    """What the target reads. What is to be saved is read after it, by the reader of the final norm's output."""
    saves = [] if config.saved is None else [SaveHidden(SavedRows.STATE)]
    return [*_marks(config), *inputs, *saves]


def _recurrence(config: BuildConfig, *, prompt: bool) -> list[Pass]:
    return [BindRecurrence(prompt)] * config.recurrent


def _choice(config: BuildConfig, kind: Kind) -> list[Pass]:
    """From logits to accepted tokens, by the rule; and records of what was chosen from."""
    kernels, same = ChooseSampling(config.kernels.native), _same_choice(config, kind)
    if kind != "scored":
        of_rule: Kind = "sampled" if kind == "drawn" and not config.rule.draws_without_scores else kind
        return [*config.rule.passes(of_rule), *same, kernels]
    chosen: list[Pass] = []
    for item in config.rule.passes("sampled"):
        # Accepting adds noise to the scores in place.
        chosen += [item, *[RecordScores()] * (config.scores and isinstance(item, ProcessLogits))]
    return [*chosen, *same, RecordLogprobs(), kernels]


def _after_commit(config: BuildConfig, kind: ChunkKind) -> list[Pass]:
    """A drafter's own state, unless no tier could use it, the rule's, and that of guides."""
    mode = config.mode.commit_passes() if config.max_draft_len else []
    if config.trees:
        mode = [*mode, *config.mode.tree_commit_passes()]
    passes = [*mode, *_same_proposals(config, mode), *(config.rule.commit_passes() if kind != "inner" else [])]
    if config.kernels.native:
        proposes = bool(mode) and "proposed" in config.mode.goals
        passes += [ChooseCommit(), *[ChooseDrafting()] * proposes]
    if kind not in WITHOUT_GUIDES:
        passes += [AdvanceGuide(), *[TruncateDrafts()] * config.truncates_drafts]
        passes += [TruncateTree()] * config.truncates_trees
    return passes


def _split_goals(config: BuildConfig) -> Facts:
    """What the target's executables do not make the drafter read, its own do."""
    return facts("target_dropped", "subexpressions_shared") | (facts("drafter_read") - config.mode.goals)


def _pipeline(config: BuildConfig, passes: Sequence[Pass], goals: Facts, name: str) -> Pipeline:
    return Pipeline(place_passes(passes, config.passes), goals, name)
