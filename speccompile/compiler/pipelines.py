"""The passes of each executable, in the order in which they run.

Modes and acceptance rules provide parts of the lists. The user's own passes are inserted at their anchors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from speccompile.acceptance.forced import FillDrafts
from speccompile.acceptance.forced_tree import FillTree
from speccompile.compiler.config import BuildConfig
from speccompile.compiler.default_pool import gathers
from speccompile.graph.keys import ChunkKind
from speccompile.graph.step_form import StepForm
from speccompile.hidden_states.options import SavedRows
from speccompile.ops.cpu.packing import WeightPacks
from speccompile.passes.base import Facts, Pass, facts
from speccompile.passes.pipeline import Pipeline
from speccompile.passes.placement import place_passes
from speccompile.passes.ranks.broadcast_choice import BroadcastChoice
from speccompile.passes.ranks.broadcast_drafts import BroadcastDrafts
from speccompile.passes.ranks.broadcast_proposals import BroadcastProposals
from speccompile.passes.ranks.choose_from_shards import ChooseFromShards
from speccompile.passes.step.bind_recurrence import BindRecurrence
from speccompile.passes.step.commit import Commit
from speccompile.passes.step.drafts import LimitDrafts, NoDrafts
from speccompile.passes.step.drop_target import DropTarget
from speccompile.passes.step.elide_copies import ElideCopies
from speccompile.passes.step.forbid_placeholders import ForbidPlaceholders
from speccompile.passes.step.guide_drafts import GuideDrafts, TruncateTree
from speccompile.passes.step.hand_over import StoreDrafts, read_stored
from speccompile.passes.step.join_inputs import JoinInputs
from speccompile.passes.step.judge_chain import JudgeChain
from speccompile.passes.step.last_logits import LastLogits
from speccompile.passes.step.mixed import BindMixedRows, MixedInputs
from speccompile.passes.step.move_path import FollowPath, MovePath
from speccompile.passes.step.propose_from_hidden import ProposeFromHidden, ProposeTreeFromHidden
from speccompile.passes.step.read_embeddings import ReadEmbeddings
from speccompile.passes.step.record_prompt import RecordPrompt
from speccompile.passes.step.record_scores import RecordLogprobs, RecordScores
from speccompile.passes.step.rows import BindRows
from speccompile.passes.step.sample import ProcessLogits
from speccompile.passes.step.save_hidden import MarkSaved, SaveHidden
from speccompile.passes.step.share_subexpressions import ShareSubexpressions
from speccompile.passes.step.skip_logits import SkipLogits
from speccompile.passes.step.tap_hidden import LowerTaps, MarkTaps
from speccompile.passes.step.tree_accept import JoinScores
from speccompile.passes.step.tree_inputs import TreeInputs
from speccompile.passes.step.use_filters import UseFilters
from speccompile.passes.step.verify_inputs import PrefillInputs, VerifyInputs
from speccompile.passes.target.add_adapters import AddAdapters
from speccompile.passes.target.bind_rope_positions import BindRopePositions
from speccompile.passes.target.bound_positions import BoundPositions
from speccompile.passes.target.choose_attention import ChooseAttention, KeepAttention, NoAttention
from speccompile.passes.target.choose_experts import ChooseExperts
from speccompile.passes.target.choose_linear import KeepLinears, PackLinears
from speccompile.passes.target.choose_recurrence import ChooseRecurrence
from speccompile.passes.target.fuse_linears import FuseLinears
from speccompile.passes.target.fuse_rotary_attention import FuseRotaryAttention
from speccompile.passes.target.fuse_rotary_tables import FuseRotaryTables
from speccompile.passes.target.join_linears import JoinLinears
from speccompile.passes.target.join_weights import JoinWeights
from speccompile.passes.target.mark_embeddings import MarkEmbeddings
from speccompile.passes.target.move_norms import MoveNorms
from speccompile.passes.target.outline import OutlineLayers
from speccompile.passes.target.outline_ends import OutlineEnds
from speccompile.passes.target.page_kv import PageKV
from speccompile.passes.target.tree_bodies import AddTreeBodies
from speccompile.passes.target.use_skinny_linears import UseSkinnyLinears
from speccompile.utils.joined_weights import JoinedWeights

#: Passes at the end of every step.
_LAST: tuple[Pass, ...] = (ShareSubexpressions(), ElideCopies())
#: Kinds without guides: requests with a guide run steps of other kinds.
WITHOUT_GUIDES: tuple[ChunkKind, ...] = ("greedy", "drawn", "inner")


def model_pipeline(config: BuildConfig, packs: WeightPacks, joined: JoinedWeights | None = None) -> Pipeline:
    """Passes over the captured model; all tiers start from the resulting graph.

    ``joined`` moves the model's weights; None moves no weights.
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
    # What is added between two layers is added before the norm of the second.
    adds_to_layers = config.inputs is not None and config.inputs.layers > 0
    passes = [
        *[BindRopePositions()] * config.rope_parts,
        BoundPositions(),
        attention,
        *[FuseRotaryAttention()] * (native and config.attends and config.route == "attention"),
        *([] if config.paging is None else [PageKV(config.paging, gathers=gathers(config))]),
        *[ChooseRecurrence(native)] * config.recurrent,
        *[ChooseExperts(native, packs)] * config.experts,
        *([] if config.adapters is None else [AddAdapters(config.adapters, native)]),
        *_linears(config, packs),
        *[JoinWeights(joined or JoinedWeights())] * config.kernels.joins_weights,
        *[UseSkinnyLinears()] * config.kernels.skinny_linears,
        *[MoveNorms()] * (config.kernels.few_launches and not adds_to_layers),
        OutlineLayers(),
        *[MarkEmbeddings()] * (config.inputs is not None),
        *[OutlineEnds()] * config.kernels.few_launches,
        *[AddTreeBodies()] * bool(config.trees),
    ]
    return _pipeline(config, passes, facts("outlined"), "the captured model")


def _linears(config: BuildConfig, packs: WeightPacks) -> list[Pass]:
    if config.kernels.native:
        return [PackLinears(packs), JoinLinears(), FuseLinears(), FuseRotaryTables()]
    if config.weights.rounds:
        return [PackLinears(packs, rounded_only=True), JoinLinears()]
    return [KeepLinears()]


def step_pipeline(config: BuildConfig, form: StepForm) -> Pipeline:
    """Passes that turn the outlined model into an executable of this form."""
    if form.kind == "catch_up":
        return _drafter_pipeline(config, form, config.mode.catching_up(form), facts("drafter_read"))
    passes = [
        _rows(config, form),
        *_filters(config, form),
        *_drafts(config, form),
        *_marks(config),
        *_inputs(config, form),
        *_after_logits(config, form),
        *_choice(config, form),
        *_commit(config, form),
        *_after_commit(config, form),
        *[JoinInputs()] * _joins_inputs(config, form),
        *_LAST,
    ]
    return _pipeline(config, passes, _goals(config, form), form.name)


def drafter_pipeline(config: BuildConfig, form: StepForm) -> Pipeline | None:
    """Passes of the executable of a split drafter, which runs before a step of this form; None if the step has no
    drafts."""
    if not config.mode.split or form.drafts == 0:
        return None
    form = config.drafter_form(form)
    passes = [*config.mode.drafting(form), StoreDrafts(form.begin or 0, config.mode.name)]
    return _drafter_pipeline(config, form, passes, facts("drafts_stored"))


def _drafter_pipeline(config: BuildConfig, form: StepForm, passes: Sequence[Pass], goals: Facts) -> Pipeline:
    """Passes of an executable without the target."""
    passes = [_rows(config, form), *_filters(config, form), *passes, DropTarget(), *_LAST]
    name = form.name if form.kind == "catch_up" else f"drafter of {form.name}"
    return _pipeline(config, passes, goals | facts("target_dropped", "subexpressions_shared", "copies_elided"), name)


def step_pipelines(config: BuildConfig, chunk_width: int) -> Iterator[Pipeline]:
    """A pipeline of each form of a step that a wrap may build, for one row and one width of prompt chunks."""
    for kind in config.kinds:
        for shape in (*config.trees, *{0, config.chains[-1]}):
            form = config.form(shape, 1, kind)
            yield step_pipeline(config, form)
            if (own := drafter_pipeline(config, form)) is not None:
                yield own
            if form.tree is None:
                yield step_pipeline(config, replace(form, prompt_rows=config.prompt_rows(shape)))
    chunks: list[ChunkKind] = [*config.kinds, "inner", "prompt_scored", *catch_up_kinds(config)]
    for chunk in chunks:
        yield step_pipeline(config, config.form(kind=chunk, chunk=chunk_width))


def catch_up_kinds(config: BuildConfig) -> list[ChunkKind]:
    """``catch_up`` if the drafter of the wrap may not have read all tokens, else nothing."""
    return ["catch_up"] * bool(config.catches_up)


# --- parts of the lists --------------------------------------------------------------------------


def _rows(config: BuildConfig, form: StepForm) -> Pass:
    if form.chunk:
        return BindRows(1, "prefill_slot")
    if form.prompt_rows:
        return BindMixedRows(form.rows, form.prompt_rows, config.width(form.drafts))
    return BindRows(form.rows)


def _filters(config: BuildConfig, form: StepForm) -> list[Pass]:
    """Steps of the kind ``drawn`` only have the filters as processors."""
    return [UseFilters()] * (form.kind == "drawn" and config.uses_filters)


def _drafts(config: BuildConfig, form: StepForm) -> list[Pass]:
    """Passes from rows to drafts, and to the number of drafts that are judged."""
    if not form.drafts:
        return [NoDrafts()]
    mode = config.mode
    if mode.split:
        drafts: list[Pass] = [read_stored(form.drafts, probabilities=form.probabilities, proposals=mode.ready)]
    else:
        drafts = mode.drafting(form)
    if form.tree is None:
        limited = any("drafts_limited" in item.provides for item in drafts)
        # A new list: the mode may keep its own.
        if config.inputs is not None:
            drafts = [*drafts, ForbidPlaceholders(config.inputs.placeholders)]
        drafts = [*drafts, *[FillDrafts(form.drafts)] * config.rule.fills_drafts, *[LimitDrafts()] * (not limited)]
    elif config.rule.fills_drafts:
        drafts = [*drafts, FillTree(form.tree)]
    # Drafts of a network or of the target's layers are those of the first rank. Other drafts only depend on tokens,
    # which are equal on all ranks.
    ranks, drafted = config.ranks, config.network is not None or mode.runs_target_layers
    return [*drafts, *([] if ranks is None or not drafted else [BroadcastDrafts(ranks.name, ranks.size)])]


def _marks(config: BuildConfig) -> list[Pass]:
    """Passes that mark values of the target.

    They run before the inputs are bound, which may exclude some positions from the lm_head.
    """
    taps = config.mode.taps if config.max_draft_len else ()
    return [*[MarkTaps(taps)] * bool(taps), *([] if config.saved is None else [MarkSaved(config.saved.taps)])]


def _inputs(config: BuildConfig, form: StepForm) -> list[Pass]:
    """Passes that bind the target's tokens, and those that save its hidden states.

    Hidden states are read after the final norm. Those of a tree are read after the commit, along the accepted path.
    """
    saves: list[Pass] = [SaveHidden(SavedRows.STATE)] * (config.saved is not None)
    recurrence: list[Pass] = [BindRecurrence(prompt=bool(form.chunk))] * config.recurrent
    if form.chunk:
        inner = form.kind == "inner"
        images = [] if config.inputs is None else [ReadEmbeddings(config.inputs)]
        inputs: list[Pass] = [PrefillInputs(form.chunk), *recurrence, *images, *[LastLogits()] * (not inner)]
        return [*inputs, *saves, *[SkipLogits()] * inner]
    if form.tree is not None:
        return [TreeInputs(form.tree)]
    if form.prompt_rows:
        return [MixedInputs(form.drafts), *saves]
    return [VerifyInputs(form.drafts, config.width(form.drafts)), *recurrence, *saves]


def _after_logits(config: BuildConfig, form: StepForm) -> list[Pass]:
    return [] if form.kind == "inner" or not config.max_draft_len else config.mode.after_logits(form)


def _choice(config: BuildConfig, form: StepForm) -> list[Pass]:
    """Passes from logits to accepted tokens, by the rule, and those that record scores and log-probabilities."""
    if form.kind == "inner":
        return []
    rule, kind = config.rule, form.step_kind
    scored, chosen = kind == "scored", _same_choice(config, form)
    by_scores = kind == "drawn" and not rule.draws_without_scores
    if form.tree is not None:
        judged = rule.passes(replace(form, kind="sampled" if by_scores else kind))
        scores = [JoinScores(form.tree), RecordScores()] * (scored and config.scores)
        records = [MovePath(scored), *scores, *[RecordLogprobs()] * scored]
        return [*judged, *chosen, JudgeChain(form.tree), *records]
    if not scored:
        return [*rule.passes(replace(form, kind="sampled" if by_scores else kind)), *chosen]
    recorded: list[Pass] = []
    for item in rule.passes(replace(form, kind="sampled")):
        # Accepting adds noise to the scores in place.
        recorded += [item, *[RecordScores()] * (config.scores and isinstance(item, ProcessLogits))]
    return [*recorded, *chosen, RecordLogprobs()]


def _same_choice(config: BuildConfig, form: StepForm) -> list[Pass]:
    """Passes by which all ranks choose the same tokens, without the other ranks' logits if no processor needs them."""
    ranks = config.ranks
    if ranks is None:
        return []
    own_probs = config.rule.uses_draft_probs and config.network is not None and form.draws
    passes: list[Pass] = [BroadcastChoice(ranks.name, ranks.size, own_probs)]
    return [*passes, *[ChooseFromShards(ranks.rank)] * (form.kind in ("greedy", "drawn"))]


def _commit(config: BuildConfig, form: StepForm) -> list[Pass]:
    if form.kind == "inner":
        return []
    passes: list[Pass] = [*[RecordPrompt()] * (form.kind == "prompt_scored"), Commit()]
    if form.tree is not None:
        saved = config.saved is not None
        passes += [FollowPath()] * (saved or config.network is not None or config.mode.drafts_from_hidden)
        passes += [SaveHidden(SavedRows.STATE)] * saved
    return passes


def _after_commit(config: BuildConfig, form: StepForm) -> list[Pass]:
    """Passes that update the state of the drafter (if a tier has drafts), of the rule, and of guides."""
    passes: list[Pass] = []
    if config.max_draft_len:
        passes = [*[LowerTaps()] * bool(config.mode.taps), *config.mode.after_commit(form)]
    # Proposals from hidden states are those of the first rank, as drafts of a network are.
    from_hidden = any(isinstance(item, ProposeFromHidden | ProposeTreeFromHidden) for item in passes)
    if config.ranks is not None and from_hidden:
        passes.append(BroadcastProposals(config.ranks.name, config.ranks.size))
    passes += config.rule.commit_passes() if form.kind != "inner" else []
    if form.kind not in WITHOUT_GUIDES:
        passes += [GuideDrafts()] * config.guides_drafts
        passes += [TruncateTree()] * config.truncates_trees
    return passes


def _joins_inputs(config: BuildConfig, form: StepForm) -> bool:
    decodes = form.tree is None and not form.chunk and not form.prompt_rows
    return decodes and (config.kernels.few_launches or config.kernels.native) and not config.passes


def _goals(config: BuildConfig, form: StepForm) -> Facts:
    """Facts that hold in a finished executable."""
    goals = {"committed", "subexpressions_shared", "copies_elided", *config.kept_facts}
    goals.update(["hidden_saved"] * (config.saved is not None))
    goals.update(["recurrence_bound"] * config.recurrent)
    if form.kind not in WITHOUT_GUIDES:
        goals.update(["drafts_guided"] * config.guides_drafts)
        goals.update(["tree_truncated"] * config.truncates_trees)
    if form.step_kind == "scored":
        goals.add("logprobs_recorded")
        goals.update(["scores_recorded"] * config.scores)
    goals.update(["prompt_recorded"] * (form.kind == "prompt_scored"))
    return frozenset(goals)


def _pipeline(config: BuildConfig, passes: Sequence[Pass], goals: Facts, name: str) -> Pipeline:
    return Pipeline(place_passes(passes, config.passes), goals, name)
