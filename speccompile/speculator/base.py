"""The lifecycle of a speculator: ``wrap``, ``rebuild``, ``close``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self

from transformers import PreTrainedModel

from speccompile.compiler.build import Build
from speccompile.compiler.options import WrapOptions
from speccompile.errors import CannotCopy, Closed, Rebuilt, UnsupportedSharded
from speccompile.graph.keys import DRAWING
from speccompile.hidden_states.writer import RecordWriter
from speccompile.multimodal.encoder import FeatureEncoder
from speccompile.multimodal.source import SourceEncoder
from speccompile.runtime.check import Answer, answer_of
from speccompile.runtime.engine import Engine
from speccompile.runtime.options import StepTraits
from speccompile.runtime.outcomes import Outcomes
from speccompile.runtime.policy_controller import AnyPolicy
from speccompile.runtime.saver import Saver
from speccompile.runtime.target import Target
from speccompile.utils.memory import trim_heap


def _encoder_of(model: PreTrainedModel, build: Build) -> FeatureEncoder | SourceEncoder | None:
    if build.info.source_positions is not None:
        return SourceEncoder(model, build.info.source_positions)
    return None if build.config.inputs is None else FeatureEncoder(model, build.config.inputs)


class SpeculatorBase:
    """The engine of a wrapped model. A context manager that closes itself."""

    #: The error class that every use raises while there is no engine.
    _closed_error: type[Closed] = Closed

    def __init__(
        self,
        model: PreTrainedModel,
        build: Build,
        policy: AnyPolicy,
        options: WrapOptions,
        writer: RecordWriter | None,
        rebuild: Callable[[PreTrainedModel, WrapOptions, Any], object],
    ) -> None:
        self._rebuild = rebuild
        self.take(model, build, policy, options, writer)

    def take(
        self,
        model: PreTrainedModel,
        build: Build,
        policy: AnyPolicy,
        options: WrapOptions,
        writer: RecordWriter | None,
    ) -> None:
        """Create an engine over ``build``, and use it from now on."""
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
            calls_host=build.captures is None and config.ranks is None,
            kv=config.kv,
            encoder=_encoder_of(model, build),
        )
        engine = Engine(
            target,
            arena=build.arena,
            executables=build.executables,
            build=build.make,
            build_mixed=build.make_mixed,
            policy=policy,
            outcomes=Outcomes.of(build.arena, build.pack, None if config.ranks is None else config.ranks.wait_for),
            traits=StepTraits(
                ready=config.mode.ready and not config.rule.fills_drafts,
                drafts_known=config.drafts_known,
                one_shape=config.one_shape,
                reads_dead_positions=config.reads_dead_positions,
                captured=build.captures is not None,
                segments=config.drafts_in_segments,
                reach=None if config.network is None else config.network.max_len,
                drawn_options=config.drawn_options,
                prompts_differ=any(shape.prompts_differ for shape in build.observed.recurrent.values()),
                network_on_demand=config.mode.ready and config.mode.split and config.max_draft_len > 0,
            ),
            options=options.engine,
            host_draft=config.mode.host_draft if config.max_draft_len else None,
            adapters=config.adapters,
            saver=None if writer is None or config.saved is None else Saver(writer, config.saved, build.arena),
            ranks=config.ranks,
        )
        if options.learn is not None:
            assert build.drafter is not None and config.saved is not None
            engine.training.start(
                options.learn, build.drafter.network.module, build.drafter.packs, config.saved, target
            )
        if options.sampling and (config.ranks is None or config.ranks.leads):
            # No other thread has the engine yet, so no step runs meanwhile.
            for kind in config.kinds:
                if kind in DRAWING:
                    engine.prepare(kind)
        answer: Answer = partial(answer_of, target)
        self._answer: Answer | None = answer if config.ranks is None else config.ranks.on_all("a check", answer)
        self._config, self._options, self._model_name = config, options, build.info.name
        #: The policy that was given to ``wrap``; :meth:`set_tier` returns to it.
        self._wrap_policy = policy
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
        """Refuse ``copy`` and ``pickle``.

        Raises:
            CannotCopy: always.
        """
        raise CannotCopy()

    @property
    def engine(self) -> Engine:
        """The engine that accepts and steps requests.

        Raises:
            Closed: the speculator was closed.
        """
        return self._open()[0]

    # --- ranks of a sharded model ----------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's number among the ranks of a sharded model. Rank 0 leads, and accepts requests."""
        return 0 if self._config.ranks is None else self._config.ranks.rank

    def follow(self) -> None:
        """Run what rank 0 of a sharded model runs, until rank 0 closes its speculator. Every other rank calls this.

        Raises:
            UnsupportedSharded: the model is not sharded, or this is rank 0.
            RankLost: rank 0 or another rank has ended, or did not answer in time.
            RanksDiffer: the ranks have different tokens.
        """
        _, target = self._open()
        ranks = self._config.ranks
        if ranks is None or ranks.leads:
            reason = "the model is not sharded" if ranks is None else "this is rank 0, which the others follow"
            raise UnsupportedSharded(what="follow()", reason=reason)
        ranks.follow(target.state_of_weights)

    def _refuse_sharded(self, what: str, reason: str) -> None:
        """Check that the model is not sharded.

        Raises:
            UnsupportedSharded: it is.
        """
        if self._config.ranks is not None:
            raise UnsupportedSharded(what=what, reason=reason)

    # --- the end ---------------------------------------------------------------------------------

    def rebuild(self) -> None:
        """Build again, with the options of ``wrap``, for the current model: after a
        :class:`~speccompile.errors.ModelChanged`, with other hooks, another active adapter, or other modules.

        All requests are cancelled, and new ones are refused until the build is done: both raise
        :class:`~speccompile.errors.Rebuilt`. Statistics, tier and policy start again. If the build fails, this
        speculator is closed.

        Raises:
            SpecCompileError: the errors of ``wrap``. An error before the build begins leaves this speculator unchanged.
        """
        _, target = self._open()
        self._refuse_sharded("rebuild()", "all ranks must build at the same time; start them again")
        self._rebuild(target.model, self._options, self)

    @property
    def closed(self) -> bool:
        """Whether the speculator was closed, or the build of :meth:`rebuild` failed."""
        return self._engine is None

    def close(self) -> None:
        """End all requests, write pending records, and release arena, executables and model. The model itself does not
        change. Memory that only this wrap used (packed weights, KV, steps) is returned to the system.

        Raises:
            RecordsNotWritten: pending records cannot be written.
        """
        self._release(Closed)

    def close_to_rebuild(self) -> None:
        """Close the engine before a new build. Later uses raise :class:`~speccompile.errors.Rebuilt`."""
        self._release(Rebuilt)

    def _release(self, error: type[Closed]) -> None:
        # Set before the engine is removed: another thread may read it as soon as there is no engine.
        self._closed_error = error
        engine, self._engine = self._engine, None
        if self._target is not None:
            self._target.release()
        self._build = self._target = self._answer = None
        if engine is not None:
            engine.loop.closed_error = error
            engine.close()
            # Deleted before the C library returns free memory to the system.
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
