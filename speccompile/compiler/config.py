"""What a wrap is to build, as data: the options, checked, and what follows from them alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from speccompile.acceptance import Exact, Rule
from speccompile.adapters.buffers import AdapterBuffers
from speccompile.calibration.calibration import Calibration
from speccompile.graph.keys import KINDS, ChunkKind, Kind
from speccompile.graph.step_form import StepForm
from speccompile.graph.step_graph import Route
from speccompile.graph.tree import Tree, chains
from speccompile.hidden_states.options import SavedRows
from speccompile.lowering.backends import Backend
from speccompile.lowering.kernels import STOCK, Kernels
from speccompile.modes.auto import Choice
from speccompile.modes.base import Mode
from speccompile.modes.network.draft_network import DraftNetwork
from speccompile.ops.cpu.quantized import QuantizedPacks
from speccompile.passes.base import Facts, Pass, facts
from speccompile.ranks.ranks import Ranks
from speccompile.sampling.filters import FILTER_OPTIONS
from speccompile.sampling.user import UserProcessor
from speccompile.utils.weight_forms import WeightForms

# Prompt tokens that a mixed step reads along, about. On a CPU they cost little beside the weights, which are read
# anyway; of twice as many, after a long context, attention alone would take as long as the step.
MIXED_TOKENS = 8


@dataclass(frozen=True)
class BuildConfig:
    """What ``wrap`` was asked for, checked, and by which means it can be had.

    ``deterministic`` None asks for it where it costs nothing; ``route`` is known when the model has been observed;
    ``network`` is the mode's own, ``saved`` what is kept of each position to be saved, and ``choice`` is by which
    ``mode="auto"`` came to the mode. ``max_len_reason`` is empty where the caller gave ``max_len``. ``passes`` are the
    user's own. ``state_checkpoints`` are tokens between two checkpoints of recurrent state. ``recurrent`` and
    ``attends``, whether the target has layers of either kind, are known with the route, and ``experts``, whether it has
    any, with the captured graph.
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
    ranks: Ranks | None = None
    quantized: QuantizedPacks | None = None

    @property
    def target_form(self) -> str:
        """What the weights are rounded to, as a :func:`~speccompile.hidden_states.target_id.target_id` notes it."""
        calibrated = "" if self.calibration is None else f" calibrated {self.calibration.digest}"
        return f"{self.weights}{calibrated}"

    @property
    def kind(self) -> Kind:
        """What requests run that ask for nothing: the user's own processors hold for them too."""
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
        """Options of requests that run the kind ``drawn``; empty if there is none. Ranks choose from their own part of
        the logits, which only the temperature leaves possible. The user's passes may have their anchors in the
        pipeline."""
        if self.logits_processors or self.passes or self.rule.greedy_only:
            return frozenset()
        if self.uses_filters:
            return FILTER_OPTIONS
        only_chosen = self.ranks is not None and self.rule.draws_without_scores
        return frozenset({"temperature"} if only_chosen else ())

    @property
    def row_fixed(self) -> bool:
        """In all kernels a row's order of sums does not depend on other rows."""
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
        """Most draft tokens of a step, of a chain or of a tree."""
        return int(max(self.tiers))

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
        """Row counts of the executables: a step runs the smallest that holds its live rows."""
        return (self.max_batch,) if self.one_shape else row_counts(self.max_batch)

    def width(self, draft_len: int) -> int:
        """Verify width T of a tier."""
        return (self.max_draft_len if self.one_shape else draft_len) + 1

    @property
    def stores_probabilities(self) -> bool:
        """A split drafter hands over what its drafts were drawn from."""
        return self.mode.split and self.mode.draft_probs and self.rule.uses_draft_probs

    @property
    def drafts_in_segments(self) -> bool:
        """The drafter of a tier continues that of the next smaller one."""
        return self.mode.drafts_in_segments and len(self.tiers) > len({0} & set(self.tiers)) + 1

    def drafted_before(self, draft_len: int) -> int:
        """The drafts that are stored when the drafter of the tier ``draft_len`` begins."""
        return max((k for k in self.tiers if k < draft_len), default=0)

    def form(
        self, drafts: int = 0, rows: int = 1, kind: ChunkKind = "greedy", prompt_rows: int = 0, chunk: int = 0
    ) -> StepForm:
        """The form of an executable of this wrap; see :class:`~speccompile.graph.step_form.StepForm`."""
        form = StepForm(drafts, rows, kind, prompt_rows, chunk, trees=bool(self.trees))
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
    def truncates_drafts(self) -> bool:
        """Whether drafts that a guide forbids are removed after a step: proposals are state of the next step."""
        return "proposed" in self.kept_facts and not self.rule.fills_drafts

    @property
    def truncates_trees(self) -> bool:
        """The same of the nodes of proposed trees."""
        return "tree_proposed" in self.kept_facts

    @property
    def mixes(self) -> bool:
        """A prompt can be read along with the rows of a decode step: attention reads each row's live places alone, and
        it makes no difference to the text which step reads the prompt's last token. The prompt's rows would need one
        recurrent state, one after another, so a model that keeps one reads its prompts in chunks."""
        mixable = self.route == "attention" and not self.one_shape and self.rule.text_invariant and not self.recurrent
        # The executables of a split drafter read no prompt along.
        return mixable and not self.mode.split

    @property
    def mixed_row_counts(self) -> tuple[int, ...]:
        """Row counts of mixed steps, in which one slot belongs to the prompt."""
        live = range(1, self.max_batch)
        return tuple(sorted({min(rows for rows in self.row_counts if rows >= needed) for needed in live}))

    def prompt_rows(self, draft_len: int) -> int:
        """Rows of a mixed step's target that read a prompt, as wide as the others."""
        return max(1, MIXED_TOKENS // self.width(draft_len))

    @property
    def checkpoints(self) -> int:
        """How many checkpoints of recurrent state a slot has room for. In one shape no prefix is reused."""
        if self.state_checkpoints is None or self.one_shape:
            return 0
        return (self.max_len - 1) // self.state_checkpoints

    @property
    def max_width(self) -> int:
        """T of the largest tier."""
        return self.max_draft_len + 1


def row_counts(max_batch: int) -> tuple[int, ...]:
    """Powers of two below ``max_batch``, and that."""
    return (*itertools.takewhile(lambda rows: rows < max_batch, (2**power for power in itertools.count())), max_batch)
