"""A wrapped model from ``wrap`` to ``close``: its parts, and what there is to look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NoReturn, Self

from transformers import PreTrainedModel

from speccompile.compiler.build import Build
from speccompile.compiler.options import WrapOptions
from speccompile.compiler.pipelines import prefill_pipeline, tier_pipeline
from speccompile.errors import CannotCopy, Closed, InvalidOption, Rebuilt
from speccompile.graph.arena import Arena
from speccompile.graph.keys import Kind
from speccompile.graph.stage import Stages
from speccompile.graph.step_graph import Route
from speccompile.hidden_states.records import weights_digest
from speccompile.hidden_states.writer import RecordWriter
from speccompile.lowering.backends import Backend
from speccompile.lowering.kernel_list import KernelCall, kernels_called
from speccompile.lowering.tier import Tier
from speccompile.modes.base import Mode
from speccompile.passes.pipeline import Pipeline
from speccompile.runtime.engine import Engine
from speccompile.runtime.metrics import prometheus_text
from speccompile.runtime.options import StepTraits
from speccompile.runtime.outcomes import Outcomes
from speccompile.runtime.policy_controller import AnyPolicy, check_tier
from speccompile.runtime.saver import Saver
from speccompile.runtime.stats import Stats
from speccompile.runtime.target import Target
from speccompile.speculator.explain import explain
from speccompile.utils.memory import trim_heap
from speccompile.utils.numbers import python_numbers


class SpeculatorBase:
    """A context manager that closes itself."""

    #: What a use raises while there is no engine.
    _closed_error: type[Closed] = Closed

    def __init__(
        self,
        model: PreTrainedModel,
        build: Build,
        policy: AnyPolicy,
        options: WrapOptions,
        writer: RecordWriter | None,
        again: Callable[[PreTrainedModel, WrapOptions, Any], object],
    ) -> None:
        self._again = again
        self.take(model, build, policy, options, writer)

    def take(
        self,
        model: PreTrainedModel,
        build: Build,
        policy: AnyPolicy,
        options: WrapOptions,
        writer: RecordWriter | None,
    ) -> None:
        """Decode with ``build`` from now on."""
        config = build.config
        target = Target(
            model,
            build.weights,
            build.constants,
            build.packs,
            build.arena.layout,
            config.rule,
            config.logits_processors,
            () if build.drafter is None else build.drafter.weights.values(),
            calls_host=build.captures is None,
        )
        engine = Engine(
            target,
            arena=build.arena,
            executables=build.executables,
            make=build.make,
            make_mixed=build.make_mixed,
            policy=policy,
            outcomes=Outcomes.of(build.arena, build.pack),
            traits=StepTraits(
                ready=config.mode.ready and not config.rule.fills_drafts,
                one_shape=config.one_shape,
                reads_dead_places=config.reads_dead_places,
                captured=build.captures is not None,
                reach=None if config.network is None else config.network.max_len,
            ),
            options=options.engine,
            host_draft=config.mode.host_draft if config.max_draft_len else None,
            saver=None if writer is None or config.saved is None else Saver(writer, config.saved, build.arena),
        )
        if options.sampling:
            # No other thread has the engine yet, so no step runs meanwhile.
            engine.prepare("sampled")
        self._config, self._given, self._model_name = config, options, build.info.name
        self._build: Build | None = build
        self._target: Target | None = target
        self._engine: Engine | None = engine

    def __repr__(self) -> str:
        of, config = f"{type(self).__name__} of {self._model_name}", self._config
        if self.closed:
            return f"<{of}, closed>"
        tiers = ", ".join(map(str, config.tiers))
        slots = f"{config.max_batch} slot{'s' if config.max_batch > 1 else ''}"
        return f"<{of}: mode {config.mode.name!r}, tiers ({tiers}), backend {config.backend.name!r}, {slots}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """For ``copy`` and ``pickle``.

        Raises:
            CannotCopy: always.
        """
        raise CannotCopy()

    @property
    def engine(self) -> Engine:
        return self._open()[0]

    @property
    def tiers(self) -> Mapping[int, Tier]:
        """By draft length, the greedy tier of most rows; those of fewer rows are in ``spec.engine.tiers``, and once a
        request has needed them those with the sampling pipeline too. With logits processors of your own there are only
        the latter."""
        tiers = self.engine.tiers.items()
        return {draft_len: tier for (draft_len, _, kind), tier in tiers if kind == self._config.kind}

    @property
    def prefill(self) -> Mapping[int, Tier]:
        """Prefill executables by chunk width; those with the sampling pipeline are in ``spec.engine.prefill_tiers``,
        once a request has needed them."""
        return {width: tier for (width, kind), tier in self.engine.prefill_tiers.items() if kind == self._config.kind}

    @property
    def stages(self) -> Stages:
        """Stages of the largest tier, by pass; those of another are ``spec.tiers[K].stages``."""
        return self.tiers[max(self.tiers)].stages

    @property
    def arena(self) -> Arena:
        return self.engine.arena

    @property
    def mode(self) -> Mode:
        """What drafts; of ``mode="auto"``, what that chose."""
        self._open()
        return self._config.mode

    @property
    def backend(self) -> Backend:
        """What lowers step graphs here; any stage can be lowered with it."""
        self._open()
        return self._config.backend

    @property
    def target_id(self) -> str:
        """Names the target: its class, a digest of some of its weights' values, and the form they were rounded to."""
        model, form = self._open()[1].model, self._given.weights
        return " ".join([type(model).__name__, weights_digest(model), *[form] * (form != "same")])

    @property
    def hidden_states(self) -> RecordWriter:
        """What saves hidden states: its ``written`` are the ids of records on the disk, ``flush()`` writes those that
        wait for a file to be full.

        Raises:
            InvalidOption: this wrap does not.
        """
        saver = self.engine.saver
        if saver is None:
            reason = "give a folder, or a SaveHiddenStates"
            raise InvalidOption(where="wrap", name="save_hidden_states", value=None, reason=reason)
        return saver.writer

    @property
    def stats(self) -> Stats:
        return self.engine.stats

    def prometheus(self) -> str:
        """``stats``, and how many requests run and wait, in Prometheus' text format.

        Raises:
            InvalidOption: prometheus_client is not installed.
        """
        engine, now = self.engine, self.engine.capacity()
        return prometheus_text(engine.stats, running=now.slots - now.free_slots, waiting=now.waiting)

    @property
    def policy(self) -> AnyPolicy:
        return self.engine.policy

    @property
    def route(self) -> Route:
        """How attention was captured: by the attention op (``"attention"``) or as the model's own (``"eager"``)."""
        self._open()
        assert self._build is not None
        return self._build.observed.route

    @property
    def route_reason(self) -> str:
        """Why not by the attention op; empty if by it."""
        self._open()
        assert self._build is not None
        return self._build.observed.reason

    @property
    def build_seconds(self) -> dict[str, float]:
        """Seconds of each part of the build."""
        self._open()
        assert self._build is not None
        return dict(self._build.seconds)

    def pipeline(
        self, draft_len: int | None = None, *, prefill: int | None = None, kind: Kind | None = None
    ) -> Pipeline:
        """The passes of a tier (or of a prefill width), to run, bisect or change: ``spec.pipeline(3).without(...)``.

        Its :meth:`~speccompile.passes.pipeline.Pipeline.run` takes ``spec.stages["outline"].graph``. ``kind`` None is
        that of ``spec.tiers``.
        """
        engine, _ = self._open()
        kind = self._config.kind if kind is None else kind
        if draft_len is not None:
            check_tier(draft_len, engine.draft_lens)
        if prefill is not None:
            return prefill_pipeline(self._config, prefill, kind)
        draft_len = max(self._config.tiers) if draft_len is None else draft_len
        return tier_pipeline(self._config, draft_len, self._config.max_batch, kind)

    def kernels(self, draft_len: int | None = None, *, rows: int | None = None) -> tuple[KernelCall, ...]:
        """The kernels that one step of a tier calls: attention, linears, choice, commit, drafting, what Inductor wrote,
        and what is left of torch's own ops. Those of a body count for each call of it, and a split drafter is listed
        in front of the step.

        ``draft_len`` None is the largest tier, ``rows`` None the tier of most rows.
        """
        engine, _ = self._open()
        draft_len = max(self._config.tiers) if draft_len is None else draft_len
        draft_len = python_numbers(draft_len)
        check_tier(draft_len, engine.draft_lens)
        tiers = [tier for tier in engine.tiers.values() if tier.draft_len == draft_len]
        counts = {tier.key.rows: tier for tier in reversed(tiers) if tier.key.sampling == self._config.kind}
        if rows is not None and rows not in counts:
            raise InvalidOption(
                where="kernels", name="rows", value=rows, reason=f"there are tiers of {sorted(counts)} rows"
            )
        tier = counts[max(counts) if rows is None else rows]
        drafter = None if tier.drafter is None else tier.drafter.graph
        code = self._config.backend.compiled_code(tier.graph)
        if drafter is not None:
            code |= self._config.backend.compiled_code(drafter)
        return kernels_called(tier.graph, self.arena.device.type, code, drafter)

    def explain(self) -> str:
        """What was built and why, in plain words."""
        engine, _ = self._open()
        assert self._build is not None
        return explain(self._config, self._build, engine)

    # --- the end ---------------------------------------------------------------------------------

    def rebuild(self) -> None:
        """Build again, with the options given to ``wrap``, for the model as it is now: after a
        :class:`~speccompile.errors.ModelChanged`, with other hooks, another active adapter, or other modules.

        Requests that wait or run are cancelled, and those that come until it has returned are refused: both raise
        :class:`~speccompile.errors.Rebuilt`. Statistics, tier and policy begin anew. If the build fails, this
        speculator is closed.

        Raises:
            SpecCompileError: as ``wrap``. What ``wrap`` refuses before it builds leaves this speculator as it was.
        """
        _, target = self._open()
        self._again(target.model, self._given, self)

    @property
    def closed(self) -> bool:
        """Whether it was closed, or the build of :meth:`rebuild` failed."""
        return self._engine is None

    def close(self) -> None:
        """End all requests, write records that wait, and let go of arena, executables and model; the model itself
        stays as it is. What only this wrap used is the system's again when this returns: packed weights, KV, steps.

        Raises:
            RecordsNotWritten: the disk does not take them.
        """
        self._release(Closed)

    def close_to_rebuild(self) -> None:
        """:meth:`close`, after which uses raise :class:`~speccompile.errors.Rebuilt`."""
        self._release(Rebuilt)

    def _release(self, error: type[Closed]) -> None:
        # Set first: another thread may look as soon as there is no engine.
        self._closed_error = error
        engine, self._engine, self._build, self._target = self._engine, None, None, None
        if engine is not None:
            engine.closed_error = error
            engine.close()
            # Freed before the C library is asked to return what is free.
            del engine
            trim_heap()

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> tuple[Engine, Target]:
        if self._engine is None or self._target is None:
            raise self._closed_error()
        return self._engine, self._target
