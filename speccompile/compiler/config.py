"""The options of a wrap after their checks, and the values that only depend on them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import torch

from speccompile.acceptance import Exact, Rule
from speccompile.adapters.buffers import AdapterBuffers
from speccompile.calibration.calibration import Calibration
from speccompile.graph.keys import KINDS, ChunkKind, Kind
from speccompile.graph.paging import Paging
from speccompile.graph.step_form import StepForm
from speccompile.graph.step_graph import Route
from speccompile.graph.tree import Tree, chains, depth_of
from speccompile.hidden_states.options import SavedRows
from speccompile.lowering.backends import Backend
from speccompile.lowering.kernels import STOCK, Kernels
from speccompile.modes.auto import Choice
from speccompile.modes.base import Mode
from speccompile.modes.network.draft_network import DraftNetwork
from speccompile.multimodal.model_inputs import ModelInputs
from speccompile.ops.cpu.quantized import QuantizedPacks
from speccompile.passes.base import Facts, Pass, facts
from speccompile.ranks.ranks import Ranks
from speccompile.sampling.filters import FILTER_OPTIONS
from speccompile.sampling.user import UserProcessor
from speccompile.utils.kv_memory import KVMemory
from speccompile.utils.weight_forms import WeightForms

# About how many prompt tokens a mixed step processes. On a CPU they cost little beside the weights, which the step
# reads in any case. With twice as many after a long context, their attention would double the time of the step.
MIXED_TOKENS = 8


@dataclass(frozen=True)
class BuildConfig:
    """The options of ``wrap`` after their checks, and the objects that realise them.

    Args:
        deterministic: None means deterministic logits where they cost nothing.
        route: None until the model has been observed.
        network: the mode's own network.
        saved: which values of each position are kept to be saved.
        choice: the choice of ``mode="auto"`` that led to ``mode``.
        max_len_reason: why ``max_len`` has its value; empty if the caller gave it.
        passes: the user's own.
        state_checkpoints: tokens between two checkpoints of recurrent state.
        recurrent, attends: whether the target has layers with a recurrent state, and with attention; known with the
            route.
        experts: whether the target has experts; known with the captured graph.
        kv: dtype of the target's cached keys and values; None is that of the model.
        kv_memory: the size of the pool of pages of KV; None gives each slot a piece of ``max_len`` positions.
        paging: the pool; known with the sizes of the KV.
        inputs: what the target accepts beside tokens; None if it embeds only text.
        rope_parts: whether its rotary positions have parts; known with the captured graph.
    """

    mode: Mode
    tiers: tuple[int, ...]
    max_batch: int
    max_len: int
    backend: Backend
    deterministic: bool | None
    kernels: Kernels = STOCK
    weights: WeightForms = field(default_factory=WeightForms)
    calibration: Calibration | None = None
    route: Route | None = None
    rule: Rule = field(default_factory=Exact)
    logits_processors: tuple[UserProcessor, ...] = ()
    scores: bool = False
    network: DraftNetwork | None = None
    saved: SavedRows | None = None
    choice: Choice | None = None
    max_len_reason: str = ""
    passes: tuple[Pass, ...] = ()
    state_checkpoints: int | None = None
    recurrent: bool = False
    attends: bool = True
    experts: bool = False
    adapters: AdapterBuffers | None = None
    head_adapters: AdapterBuffers | None = None
    ranks: Ranks | None = None
    quantized: QuantizedPacks | None = None
    kv: torch.dtype | None = None
    kv_memory: KVMemory | None = None
    paging: Paging | None = None
    inputs: ModelInputs | None = None
    rope_parts: bool = False

    @property
    def target_form(self) -> str:
        """The forms of the weights, and of keys and values, as a
        :func:`~speccompile.hidden_states.target_id.target_id` contains them."""
        calibrated = "" if self.calibration is None else f" calibrated {self.calibration.digest}"
        kv = "" if self.kv is None else f" kv {self.kv}"
        return f"{self.weights}{calibrated}{kv}"

    @property
    def kind(self) -> Kind:
        """The kind of requests without options. The user's own processors apply to them too."""
        return "sampled" if self.logits_processors else "greedy"

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of executables that requests may need."""
        return tuple(kind for kind in KINDS if kind != "drawn" or self.drawn_options)

    @property
    def uses_filters(self) -> bool:
        """Steps of the kind ``drawn`` have one op for temperature, top-k, top-p and min-p."""
        return self.kernels.filters and self.ranks is None

    @property
    def drawn_options(self) -> frozenset[str]:
        """Options of requests that run the kind ``drawn``; empty if no request does.

        Each rank chooses from its own part of the logits, which is only possible with the temperature. The user's
        passes may have their anchors in the pipeline of processors, which ``drawn`` does not run.
        """
        if self.logits_processors or self.passes or self.rule.greedy_only:
            return frozenset()
        if self.uses_filters:
            return FILTER_OPTIONS
        only_chosen = self.ranks is not None and self.rule.draws_without_scores
        return frozenset({"temperature"} if only_chosen else ())

    @property
    def row_fixed(self) -> bool:
        """Whether no kernel's order of sums in a row depends on other rows."""
        return self.kernels.native and self.route == "attention"

    @property
    def one_shape(self) -> bool:
        """Whether all tiers run one shape, which keeps the order of sums where the kernels do not."""
        return self.deterministic is True and not self.row_fixed

    @property
    def reads_dead_positions(self) -> bool:
        """Whether attention also reads positions of a slot after the end of its sequence, and masks them."""
        routes = [self.route, *([] if self.network is None else [self.network.route])]
        return self.one_shape or "eager" in routes

    @property
    def keeps_bits(self) -> bool:
        """Whether a context's logits have the same bits in every tier, row and position."""
        return self.one_shape or (self.row_fixed and self.deterministic is not False)

    @property
    def max_draft_len(self) -> int:
        """Most draft tokens of a step, of a chain or of a tree."""
        return int(max(self.tiers))

    @property
    def deepest(self) -> int:
        """Most drafts that a step accepts."""
        return max(map(depth_of, self.tiers))

    @property
    def chains(self) -> tuple[int, ...]:
        """Draft lengths of the tiers that are chains."""
        return chains(self.tiers)

    @property
    def trees(self) -> tuple[Tree, ...]:
        """The tiers that are trees."""
        return tuple(shape for shape in self.tiers if isinstance(shape, Tree))

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Row counts of the executables; a step runs the smallest that holds its live rows."""
        return (self.max_batch,) if self.one_shape else row_counts(self.max_batch)

    def width(self, draft_len: int) -> int:
        """Verify width T of a tier."""
        return (self.max_draft_len if self.one_shape else draft_len) + 1

    @property
    def stores_probabilities(self) -> bool:
        """Whether a split drafter stores the probabilities that its drafts were drawn from."""
        return self.mode.split and self.mode.draft_probs and self.rule.uses_draft_probs

    @property
    def drafts_in_segments(self) -> bool:
        """Whether the drafter of a tier continues that of the next smaller tier."""
        return self.mode.drafts_in_segments and len(self.tiers) > len({0} & set(self.tiers)) + 1

    @property
    def drafts_known(self) -> bool:
        """Whether the drafts of every step are known before it, as chains: the host can ask a guide about them."""
        known = self.mode.ready and not self.mode.split and not self.rule.fills_drafts and not self.trees
        return known and any(spec.name == "draft_tokens" for spec in self.mode.state(self.tiers))

    @property
    def catches_up(self) -> int:
        """Most tokens of a sequence that the drafter's executables have not read when they run; 0 if every step updates
        the drafter."""
        return self.mode.unread_tokens(self.deepest) if self.max_draft_len else 0

    def drafted_before(self, draft_len: int) -> int:
        """Number of drafts that are stored when the drafter of the tier ``draft_len`` begins."""
        return max((k for k in self.tiers if k < draft_len), default=0)

    def form(
        self, drafts: int = 0, rows: int = 1, kind: ChunkKind = "greedy", prompt_rows: int = 0, chunk: int = 0
    ) -> StepForm:
        """The form of an executable of this wrap; see :class:`~speccompile.graph.step_form.StepForm`."""
        form = StepForm(drafts, rows, kind, prompt_rows, chunk, trees=bool(self.trees), deepest=self.deepest)
        probabilities = form.draws and self.rule.uses_draft_probs and self.mode.draft_probs
        return replace(form, probabilities=probabilities)

    def drafter_form(self, form: StepForm) -> StepForm:
        """The form of the drafter's executable before a step of ``form``."""
        return replace(form, begin=self.drafted_before(form.drafts)) if self.drafts_in_segments else form

    @property
    def kept_facts(self) -> Facts:
        """Facts about a drafter's state that hold in a finished step."""
        if self.max_draft_len == 0:
            return facts()
        passes = self.mode.after_commit(self.form())
        return frozenset().union(*(item.provides for item in passes))

    @property
    def guides_drafts(self) -> bool:
        """Whether a guide adds and removes drafts after a step: proposals are state of the next step."""
        return "proposed" in self.kept_facts and not self.rule.fills_drafts

    @property
    def truncates_trees(self) -> bool:
        """Whether nodes of proposed trees that a guide forbids are removed after a step."""
        return "tree_proposed" in self.kept_facts

    @property
    def mixes(self) -> bool:
        """Whether a decode step can also process prompt tokens.

        Attention must only read each row's live positions, and the text must not depend on which step processes the
        prompt's last token. A model with a recurrent state processes its prompts in chunks: the rows of a prompt would
        need the same state one after another.
        """
        mixable = self.route == "attention" and not self.one_shape and self.rule.text_invariant and not self.recurrent
        # The executables of a split drafter do not process prompt tokens.
        return mixable and not self.mode.split

    @property
    def mixed_row_counts(self) -> tuple[int, ...]:
        """Row counts of mixed steps, in which one of the slots processes its prompt."""
        live = range(1, self.max_batch)
        return tuple(sorted({min(rows for rows in self.row_counts if rows >= needed) for needed in live}))

    def prompt_rows(self, draft_len: int) -> int:
        """Rows of a mixed step's target that process a prompt, as wide as the other rows."""
        return max(1, MIXED_TOKENS // self.width(draft_len))

    @property
    def checkpoints(self) -> int:
        """Number of checkpoints of recurrent state of a slot. It is 0 in one shape, where no prefix is reused."""
        if self.state_checkpoints is None or self.one_shape:
            return 0
        return (self.max_len - 1) // self.state_checkpoints

    @property
    def max_width(self) -> int:
        """T of the largest tier."""
        return self.max_draft_len + 1


def row_counts(max_batch: int) -> tuple[int, ...]:
    """Powers of two below ``max_batch``, and ``max_batch``."""
    return (*itertools.takewhile(lambda rows: rows < max_batch, (2**power for power in itertools.count())), max_batch)
