"""Properties of a speculator: tiers, stages, kernels, statistics, and the explanation of its build."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from speccompile.compiler.pipelines import step_pipeline
from speccompile.errors import InvalidOption
from speccompile.graph.arena import Arena
from speccompile.graph.keys import Kind
from speccompile.graph.stage import Stages
from speccompile.graph.step_graph import Route
from speccompile.hidden_states.target_id import target_id
from speccompile.hidden_states.writer import RecordWriter
from speccompile.lowering.backends import Backend
from speccompile.lowering.collective_list import CollectiveCall, collectives_called
from speccompile.lowering.kernel_list import KernelCall, kernels_called
from speccompile.lowering.tier import Tier
from speccompile.modes.base import Mode
from speccompile.passes.pipeline import Pipeline
from speccompile.report.data import Report
from speccompile.report.make import make_report
from speccompile.report.render.page import page
from speccompile.runtime.inputs import read_count, read_prompt
from speccompile.runtime.kv_use import KVUse, kv_use
from speccompile.runtime.learning import Learner
from speccompile.runtime.metrics import prometheus_text
from speccompile.runtime.policy_controller import AnyPolicy, check_tier
from speccompile.runtime.stats import Stats
from speccompile.speculator.base import SpeculatorBase
from speccompile.speculator.explain import explain, explanation
from speccompile.utils.numbers import python_numbers
from speccompile.utils.options import flag


class Inspection(SpeculatorBase):
    """The properties of a wrapped model, of its build and of its engine."""

    @property
    def tiers(self) -> Mapping[int, Tier]:
        """Greedy tiers by draft length, each with the most rows. ``spec.engine.tiers`` also has tiers with fewer rows.
        It has tiers with the sampling pipeline as soon as a request has needed them. With logits processors of
        ``wrap``, all tiers have the sampling pipeline."""
        tiers = self.engine.tiers.items()
        return {draft_len: tier for (draft_len, _, kind), tier in tiers if kind == self._config.kind}

    @property
    def prefill(self) -> Mapping[int, Tier]:
        """Prefill executables by chunk width. ``spec.engine.prefill_tiers`` also has those with the sampling pipeline,
        as soon as a request has needed them."""
        return {width: tier for (width, kind), tier in self.engine.prefill_tiers.items() if kind == self._config.kind}

    @property
    def stages(self) -> Stages:
        """Stages of the largest tier, by pass. ``spec.tiers[K].stages`` has the stages of another tier."""
        return self.tiers[max(self.tiers)].stages

    @property
    def arena(self) -> Arena:
        """The state tensors, by name."""
        return self.engine.arena

    @property
    def mode(self) -> Mode:
        """The mode of the wrap; with ``mode="auto"`` the chosen one."""
        self._open()
        return self._config.mode

    @property
    def backend(self) -> Backend:
        """The backend that lowers step graphs. It can lower any stage."""
        self._open()
        return self._config.backend

    @property
    def target_id(self) -> str:
        """An identifier of the target: its class, a digest of its weights, and their form if rounded."""
        target = self._open()[1]
        known = None if self._build is None else self._build.target_id
        return known or target_id(target.model, self._config.target_form)

    @property
    def hidden_states(self) -> RecordWriter:
        """The writer of hidden states. ``written`` has the ids of records on the disk; ``flush()`` writes the pending
        ones.

        Raises:
            InvalidOption: this wrap saves no hidden states.
        """
        saver = self.engine.saver
        if saver is None:
            reason = "give a folder, or a SaveHiddenStates"
            raise InvalidOption(where="wrap", name="save_hidden_states", value=None, reason=reason)
        return saver.writer

    @property
    def learner(self) -> Learner:
        """The learner that trains the draft head. Its ``history`` has the result of each judgement.

        Raises:
            InvalidOption: this wrap trains no head.
        """
        learner = self.engine.training.learner
        if learner is None:
            raise InvalidOption(where="wrap", name="learn", value=None, reason="give an OnlineTraining(...)")
        return learner

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that are loaded, in the order in which they were added."""
        return tuple(adapter.name for adapter in self.engine.adapters.loaded)

    @property
    def stats(self) -> Stats:
        """Counts and times of all requests since ``wrap``, or since ``stats.reset()``."""
        return self.engine.stats

    def memory(self) -> KVUse:
        """Return the use of the KV: pages of running requests, of known sequences, shared and free ones."""
        engine = self.engine
        return kv_use(engine.arena, engine.slots)

    def prometheus(self) -> str:
        """``stats``, and the numbers of running and waiting requests, in Prometheus' text format.

        Raises:
            InvalidOption: prometheus_client is not installed.
        """
        engine, now = self.engine, self.engine.capacity()
        return prometheus_text(engine.stats, running=now.slots - now.free_slots, waiting=now.waiting)

    @property
    def policy(self) -> AnyPolicy:
        """The policy that chooses the draft length of each step."""
        return self.engine.policy

    @property
    def route(self) -> Route:
        """The captured form of attention: the attention op (``"attention"``), or the model's own code (``"eager"``)."""
        self._open()
        assert self._build is not None
        return self._build.observed.route

    @property
    def route_reason(self) -> str:
        """The reason why the route is not the attention op; empty if it is."""
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

        Its :meth:`~speccompile.passes.pipeline.Pipeline.run` accepts ``spec.stages["outline"].graph``. ``kind`` None
        means the kind of ``spec.tiers``.
        """
        engine, _ = self._open()
        kind = self._config.kind if kind is None else kind
        if draft_len is not None:
            check_tier(draft_len, engine.draft_lens)
        if prefill is not None:
            return step_pipeline(self._config, self._config.form(kind=kind, chunk=prefill))
        draft_len = max(self._config.tiers) if draft_len is None else draft_len
        return step_pipeline(self._config, self._config.form(draft_len, self._config.max_batch, kind))

    def kernels(self, draft_len: int | None = None, *, rows: int | None = None) -> tuple[KernelCall, ...]:
        """Return the kernels that one step of a tier calls: attention, linears, choice, commit, drafting, Inductor's
        kernels and the remaining ops of torch. Kernels of a body are listed for each call of it. A split drafter is
        listed before the step.

        ``draft_len`` None means the largest tier, ``rows`` None the tier of most rows.
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
        drafters = [segment.graph for segment in tier.segments]
        code = self._config.backend.compiled_code(tier.graph)
        for drafter in drafters:
            code |= self._config.backend.compiled_code(drafter)
        return kernels_called(tier.graph, self.arena.device.type, code, drafters)

    def collectives(self, draft_len: int | None = None) -> tuple[CollectiveCall, ...]:
        """Return the collectives that the ranks of a sharded model call in one step of a tier, of most rows. The result
        is empty for other models. A body counts once for each call of it. ``draft_len`` None means the largest tier."""
        tiers = self.tiers
        draft_len = python_numbers(max(tiers) if draft_len is None else draft_len)
        check_tier(draft_len, self.engine.draft_lens)
        graphs = [tier.graph for tier in (*tiers[draft_len].segments, tiers[draft_len])]
        return tuple(call for graph in graphs for call in collectives_called(graph))

    def explain(self) -> str:
        """Describe the build and its reasons, one line for each part."""
        engine, _ = self._open()
        assert self._build is not None
        return explain(self._config, self._build, engine)

    def report(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        measure: bool = True,
        prompts: Sequence[Sequence[int] | torch.Tensor] = (),
        max_new_tokens: int = 64,
        trace: str | os.PathLike[str] | None = None,
        kind: Kind | None = None,
    ) -> Report:
        """Report the build, the cost of each step and the use of its drafts, as data and as one HTML file.

        The file loads no other files, so it can be sent and archived. ``speccompile inspect MODEL --html report.html``
        writes the same file.

        Args:
            path: the HTML file; None writes no file.
            measure: whether the tiers are timed, as wholes and call by call. This needs seconds, in which no request is
                decoded.
            prompts: token ids for each prompt. They are decoded greedily with the policy fixed to each tier in turn,
                and counted in ``stats``. The policy starts without history afterwards.
            max_new_tokens: Most new tokens of each prompt.
            trace: a file that :meth:`~speccompile.Speculator.record_trace` wrote, to be shown. None shows the trace of
                ``prompts`` at the largest tier.
            kind: kind of the executables that are shown. None means the kind of ``spec.tiers``.

        Returns:
            The data of the report. ``as_json()`` returns it as plain values.

        Raises:
            InvalidOption: an argument is not valid.
            InvalidTrace: ``trace`` cannot be read.
            InsideStep: the caller is a callback of a step.
            OSError: ``path`` cannot be written.
        """
        engine, target = self._open()
        assert self._build is not None
        flag("report", "measure", measure)
        if measure:
            self._refuse_sharded("report()", "its parts would be timed only on this rank; use measure=False")
        if kind is not None and not engine.table.prepared(kind, watched=False):
            reason = "its executables are not built; spec.prepare(sampling=True) builds those that draw tokens"
            raise InvalidOption(where="report", name="kind", value=kind, reason=reason)
        if prompts:
            target.check()
        made = make_report(
            self._config,
            self._build,
            engine,
            explanation(self._config, self._build, engine),
            kind=self._config.kind if kind is None else kind,
            measure=measure,
            prompts=[read_prompt(given, index, engine.arena.layout) for index, given in enumerate(prompts)],
            max_new_tokens=read_count("report", "max_new_tokens", max_new_tokens),
            trace=trace,
        )
        if path is not None:
            Path(path).write_text(page(made), encoding="utf-8")
        return made
