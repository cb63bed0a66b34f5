"""What a speculator shows: tiers, stages, kernels, statistics, and the explanation of its build."""

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
        """By draft length, the greedy tier with the most rows. ``spec.engine.tiers`` has those with fewer rows too,
        and, once a request has needed them, those with the sampling pipeline. With logits processors of ``wrap`` there
        are only the latter."""
        tiers = self.engine.tiers.items()
        return {draft_len: tier for (draft_len, _, kind), tier in tiers if kind == self._config.kind}

    @property
    def prefill(self) -> Mapping[int, Tier]:
        """Prefill executables by chunk width; those with the sampling pipeline are in ``spec.engine.prefill_tiers``,
        once a request has needed them."""
        return {width: tier for (width, kind), tier in self.engine.prefill_tiers.items() if kind == self._config.kind}

    @property
    def stages(self) -> Stages:
        """Stages of the largest tier, by pass. ``spec.tiers[K].stages`` are those of another tier."""
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
        """The backend that lowers step graphs. Any stage can be lowered with it."""
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
        """The writer of hidden states. ``written`` are the ids of records on the disk; ``flush()`` writes the pending
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
        """What trains the draft head. Its ``history`` says what came of each judgement.

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

    def prometheus(self) -> str:
        """``stats``, and the numbers of running and waiting requests, in Prometheus' text format.

        Raises:
            InvalidOption: prometheus_client is not installed.
        """
        engine, now = self.engine, self.engine.capacity()
        return prometheus_text(engine.stats, running=now.slots - now.free_slots, waiting=now.waiting)

    @property
    def policy(self) -> AnyPolicy:
        """What chooses the draft length of each step."""
        return self.engine.policy

    @property
    def route(self) -> Route:
        """How attention was captured: by the attention op (``"attention"``) or as the model's own (``"eager"``)."""
        self._open()
        assert self._build is not None
        return self._build.observed.route

    @property
    def route_reason(self) -> str:
        """Why the route is not the attention op; empty if it is."""
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
            return step_pipeline(self._config, self._config.form(kind=kind, chunk=prefill))
        draft_len = max(self._config.tiers) if draft_len is None else draft_len
        return step_pipeline(self._config, self._config.form(draft_len, self._config.max_batch, kind))

    def kernels(self, draft_len: int | None = None, *, rows: int | None = None) -> tuple[KernelCall, ...]:
        """The kernels that one step of a tier calls: attention, linears, choice, commit, drafting, Inductor's kernels
        and the remaining ops of torch. Those of a body count for each call of it, and a split drafter is listed before
        the step.

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
        drafters = [segment.graph for segment in tier.segments]
        code = self._config.backend.compiled_code(tier.graph)
        for drafter in drafters:
            code |= self._config.backend.compiled_code(drafter)
        return kernels_called(tier.graph, self.arena.device.type, code, drafters)

    def collectives(self, draft_len: int | None = None) -> tuple[CollectiveCall, ...]:
        """What the ranks of a sharded model send one another in one step of a tier, of most rows; empty for other
        models. A body counts once for each call of it. ``draft_len`` None is the largest tier."""
        tiers = self.tiers
        draft_len = python_numbers(max(tiers) if draft_len is None else draft_len)
        check_tier(draft_len, self.engine.draft_lens)
        graphs = [tier.graph for tier in (*tiers[draft_len].segments, tiers[draft_len])]
        return tuple(call for graph in graphs for call in collectives_called(graph))

    def explain(self) -> str:
        """A description of the build and its reasons, a line for each part."""
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
        """What was built, what each step costs and what its drafts are worth, as data and as one HTML file.

        The file loads nothing, so it can be sent and kept. ``speccompile inspect MODEL --html report.html`` writes the
        same.

        Args:
            path: the HTML file; None writes none.
            measure: whether the tiers are timed, as wholes and call by call. Seconds; no request is decoded meanwhile.
            prompts: token ids each. They are decoded greedily with the policy fixed to each tier in turn, and counted
                in ``stats``. The policy starts without history afterwards.
            max_new_tokens: Most new tokens of each prompt.
            trace: a file that :meth:`~speccompile.Speculator.record_trace` wrote, to be shown. None is what
                ``prompts`` gave at the largest tier.
            kind: of the executables that are shown. None is that of ``spec.tiers``.

        Returns:
            The data of the report. ``as_json()`` returns it as plain values.

        Raises:
            InvalidOption: an argument is not valid.
            InvalidTrace: ``trace`` cannot be read.
            InsideStep: this is a callback of a step.
            OSError: ``path`` cannot be written.
        """
        engine, target = self._open()
        assert self._build is not None
        flag("report", "measure", measure)
        if measure:
            self._refuse_sharded("report()", "its parts would be timed on this rank alone; use measure=False")
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
