"""What ``wrap`` returns: decode, swap tiers, look at everything."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from speccompile.build import Build, saved_files
from speccompile.errors import CannotSave, Closed, InvalidInput, InvalidOption
from speccompile.explain import explain
from speccompile.graph_capture.graph import Route
from speccompile.hidden_states.collect import check_collection, collect
from speccompile.hidden_states.records import RecordOrder
from speccompile.hidden_states.saver import Saver
from speccompile.hidden_states.writer import RecordWriter
from speccompile.lowering.backends import Backend
from speccompile.lowering.called import KernelCall, kernels_called
from speccompile.lowering.cpu.consume import is_consumed
from speccompile.lowering.tier import Kind, Tier
from speccompile.modes.auto import Auto
from speccompile.modes.base import Mode
from speccompile.package import make_manifest, write_package
from speccompile.passes.pipeline import Pipeline, Stages
from speccompile.pipelines import prefill_pipeline, tier_pipeline
from speccompile.plain import plain
from speccompile.runtime.arena import Arena
from speccompile.runtime.check import CheckReport, Reference, check_texts
from speccompile.runtime.engine import Engine
from speccompile.runtime.generate import decode, padded
from speccompile.runtime.inputs import check_options, read_count, read_num_draft_tokens, read_prompt, read_prompts
from speccompile.runtime.listener import Streamer, check_streamer, check_tokenizer, make_criteria
from speccompile.runtime.metrics import prometheus_text
from speccompile.runtime.options import EngineOptions
from speccompile.runtime.outcomes import Outcomes
from speccompile.runtime.outputs import as_output, read_outputs
from speccompile.runtime.policy import AnyPolicy, Fixed, check_tier
from speccompile.runtime.records import Wanted, check_flag
from speccompile.runtime.request import Params, Request
from speccompile.runtime.stats import Stats
from speccompile.runtime.target import EosTokens, Target


class Speculator:
    """A wrapped model. Made by :func:`speccompile.wrap`; a context manager that closes itself."""

    def __init__(
        self,
        model: PreTrainedModel,
        build: Build,
        policy: AnyPolicy,
        options: EngineOptions,
        given: Mapping[str, Any],
        writer: RecordWriter | None = None,
    ) -> None:
        config = self._config = build.config
        self._given = given
        self._build: Build | None = build
        self._target: Target | None = Target(
            model,
            build.weights,
            build.packs,
            build.info.vocab_size,
            config.rule,
            config.logits_processors,
            () if build.drafter is None else build.drafter.weights.values(),
        )
        self._engine: Engine | None = Engine(
            self._target,
            arena=build.arena,
            executables=build.executables,
            make=build.make,
            make_mixed=build.make_mixed,
            policy=policy,
            outcomes=Outcomes.of(build.arena, build.pack),
            ready=config.mode.ready and not config.rule.fills_drafts,
            options=options,
            one_shape=config.one_shape,
            reads_dead_places=config.reads_dead_places,
            reach=None if config.network is None else config.network.max_len,
            host_draft=config.mode.host_draft if config.max_draft_len else None,
            saver=None if writer is None or config.saved is None else Saver(writer, config.saved, build.arena),
        )

    # --- decoding --------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        return_dict_in_generate: Literal[True],
        **options: Any,
    ) -> GenerateDecoderOnlyOutput: ...

    @overload
    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        return_dict_in_generate: Literal[False] | None = None,
        **options: Any,
    ) -> torch.Tensor: ...

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        eos_token_id: EosTokens = None,
        pad_token_id: int | None = None,
        num_return_sequences: int = 1,
        num_draft_tokens: int | None = None,
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        stopping_criteria: Any = None,
        streamer: Streamer | None = None,
        do_sample: bool | None = None,
        seed: int | None = None,
        return_dict_in_generate: bool | None = None,
        output_scores: bool | None = None,
        output_logits: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        record: bool = True,
        **options: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Decode as ``model.generate`` does: greedily, the same tokens; drawn, the same distribution.

        A thin layer over ``spec.engine``, beside whatever that runs: other threads may use both meanwhile.

        Args:
            input_ids: int64 ``[B, P]``, padded on the left.
            attention_mask: ``[B, P]``, 0 at padding.
            max_new_tokens: most new tokens of a row; None: what the model's generation_config says (``max_new_tokens``,
                or ``max_length`` with the prompt), else 128. A row also ends at ``max_len``, with a warning.
            eos_token_id: one or several ids that end a row; None takes those of the model's generation_config.
            pad_token_id: what rows that end early are padded with; None takes generation_config's, else the first
                EOS id.
            num_return_sequences: continuations of each prompt, which is read once; rows follow one another as
                transformers orders them. Without ``do_sample`` they are all alike.
            num_draft_tokens: most drafts of a row and step, 0 for none; None is as many as the tier has.
            stop_strings: text or texts that end a row, with the token that completes one; needs ``tokenizer``.
            stopping_criteria: transformers' ``StoppingCriteria``, asked after each token of each row with that row's
                ids ``[1, P + new]`` and ``None`` for scores.
            streamer: a transformers streamer, for one row.
            do_sample: draw tokens instead of taking the most likely one; None is what the generation_config says.
            seed: of what is drawn; row i draws as ``seed + i`` does. None takes one from torch's default generator. The
                same seed and options give the same text in any mode, at any tier, alone and among others. Greedy text
                is the same with any.
            return_dict_in_generate: return transformers' ``GenerateDecoderOnlyOutput`` (without a cache). This and the
                two below are what the generation_config says where they are None.
            output_scores, output_logits: with it, ``scores`` (behind all processors) and ``logits`` (the model's own):
                for each new place float32 ``[B, V]``, 0 in rows that have ended, since no model ran there. They need
                ``wrap(scores=True)``.
            output_attentions, output_hidden_states: refused if True.
            record: where hidden states are saved, whether those of these rows are.
            options: of the sampling pipeline, as :meth:`Engine.submit` takes them.

        Returns:
            int64 ``[B, P + new]``, padded as transformers pads; or the output that has it as ``sequences``.

        Raises:
            UserError: see the classes in ``speccompile.errors``.
        """
        engine, target = self._open()
        others = "input_ids, attention_mask, max_new_tokens, eos_token_id, pad_token_id, num_return_sequences, "
        check_options(
            "generate",
            options,
            f"{others}num_draft_tokens, stop_strings, tokenizer, stopping_criteria, streamer, do_sample, seed, "
            "return_dict_in_generate, output_scores, output_logits, record",
        )
        outputs = {
            "return_dict_in_generate": return_dict_in_generate,
            "output_scores": output_scores,
            "output_logits": output_logits,
            "output_attentions": output_attentions,
            "output_hidden_states": output_hidden_states,
        }
        check_flag("generate", "record", record)
        wanted = read_outputs(outputs, target.model.generation_config, engine.arena)
        num_draft_tokens = read_num_draft_tokens("generate", num_draft_tokens, engine.arena.layout)
        target.check()
        eos = target.eos(eos_token_id)
        pad_token_id = plain(pad_token_id)
        if not (pad_token_id is None or isinstance(pad_token_id, int)):
            raise InvalidInput(name="pad_token_id", reason="it has to be one token id")
        pad = target.model.generation_config.pad_token_id if pad_token_id is None else pad_token_id
        copies = read_count("generate", "num_return_sequences", num_return_sequences)
        prompts = read_prompts(input_ids, attention_mask, pad, eos, engine.arena.layout, copies)
        check_streamer(streamer)
        check_tokenizer(tokenizer)
        if streamer is not None and len(prompts) > 1:
            raise InvalidInput(name="streamer", reason="it can follow one row, and there are more")
        criteria = make_criteria(stop_strings, tokenizer, stopping_criteria, "stop_strings")
        sampling = target.sampling("generate", options, do_sample=do_sample, seed=seed, eos=eos)
        params = Params(
            target.new_tokens("generate", max_new_tokens, input_ids.shape[1]),
            tuple(eos),
            sampling,
            patient=True,
            wanted=wanted or Wanted(),
            num_draft_tokens=num_draft_tokens,
        )
        input_ids = input_ids.repeat_interleave(copies, dim=0)
        requests = decode(engine, prompts, params, shown=input_ids, streamer=streamer, criteria=criteria, record=record)
        sequences = padded(input_ids, requests, pad if pad is not None else eos[0] if eos else 0)
        return sequences if wanted is None else as_output(sequences, requests)

    def check(
        self,
        prompts: Sequence[Sequence[int] | torch.Tensor] | torch.Tensor,
        *,
        max_new_tokens: int = 64,
        eos_token_id: EosTokens = None,
        reference: Reference = "transformers",
    ) -> CheckReport:
        """Decode ``prompts`` (token ids each) and compare with plain decoding.

        Args:
            reference: ``transformers`` is the model's own greedy ``generate``, ``plain`` this speculator's K=0 tier.

        Returns:
            Equal or not, and for each difference its place and the logit change that explains it. With
            ``weights="int8"`` also how much rounding alone changes there: no two forwards of such a model agree in
            more, while ``plain`` has to be equal always.
        """
        engine, target = self._open()
        if reference not in ("transformers", "plain"):
            raise InvalidOption(
                where="check", name="reference", value=reference, reason="use 'transformers' or 'plain'"
            )
        max_new_tokens = read_count("check", "max_new_tokens", max_new_tokens)
        target.check()
        eos = target.eos(eos_token_id)
        token_ids = [read_prompt(given, index, engine.arena.layout) for index, given in enumerate(prompts)]
        return check_texts(engine, target, token_ids, max_new_tokens, eos, reference)

    def save_hidden_states(
        self,
        texts: Sequence[Sequence[int] | torch.Tensor],
        *,
        ids: Sequence[str | None] | None = None,
        loss_masks: Sequence[Sequence[int]] | None = None,
        max_new_tokens: int = 1,
        do_sample: bool | None = None,
        seed: int | None = None,
        progress: bool = True,
        **options: Any,
    ) -> None:
        """Save the hidden states of many texts, and, with ``max_new_tokens`` above 1, of what the model writes behind
        them. Texts of which there are records already are passed over, so that one goes on where a killed process has
        stopped. Returns when all are on the disk.

        Args:
            texts: token ids each.
            ids: of their records; None is a digest of the text, and equal ones make one record.
            loss_masks: for each text a 0 or 1 for each of its tokens; None is all 1 where nothing is written behind
                them, else all 0.
            max_new_tokens: most new tokens. Of the last one there are no hidden states, so 1 saves the texts alone.
            do_sample, seed, options: as :meth:`generate` has them; text i draws as ``seed + i`` does.
            progress: show a bar on stderr, if that is a terminal.

        Raises:
            InvalidOption: the wrap does not save hidden states.
            RecordsNotWritten: the disk does not take them.
            UserError: an argument is not valid.
            RequestFailed: a text could not be read; the records of others are kept.
        """
        engine, target = self._open()
        writer = self.hidden_states
        check_options(
            "save_hidden_states", options, "texts, ids, loss_masks, max_new_tokens, do_sample, seed, progress"
        )
        max_new_tokens = read_count("save_hidden_states", "max_new_tokens", max_new_tokens)
        prompts = [read_prompt(given, index, engine.arena.layout) for index, given in enumerate(texts)]
        names = check_collection(prompts, ids, loss_masks)
        target.check()
        eos = target.eos(None)
        sampling = target.sampling("save_hidden_states", options, do_sample=do_sample, seed=seed, eos=eos)
        if loss_masks is None:
            loss_masks = [[int(max_new_tokens == 1)] * len(prompt) for prompt in prompts]

        def submit(number: int, order: RecordOrder) -> Request:
            own = None if sampling is None else sampling.of_row(number)
            params = Params(max_new_tokens, tuple(eos), own, patient=True, record=order)
            shown = torch.tensor([prompts[number]])
            request = engine.new_request(prompts[number], params, shown, None, StoppingCriteriaList())
            engine.enqueue([request])
            return request

        orders = [(index, RecordOrder(id, tuple(loss_masks[index]))) for index, id in enumerate(names)]
        room = engine.arena.layout.max_batch + engine.options.max_waiting
        collect(writer, orders, submit, at_once=min(room, 2 * engine.arena.layout.max_batch), progress=progress)

    def set_tier(self, draft_len: int) -> None:
        """Use draft length ``draft_len`` from the next step on; allowed at any time, also while decoding.

        Raises:
            UnknownTier: no tier of that draft length was built.
        """
        engine, _ = self._open()
        draft_len = plain(draft_len)
        check_tier(draft_len, engine.draft_lens)
        engine.policy = Fixed(draft_len)

    @contextlib.contextmanager
    def record_trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Write what each step is offered, accepts and takes to ``path``, JSON lines, while in the ``with``: for
        ``speccompile policy-lab``. Record with ``policy="fixed:K"`` of the largest tier: what a smaller one had no room
        for is not known.

        Raises:
            OSError: it cannot be written.
        """
        engine, _ = self._open()
        engine.policies.record(path)
        try:
            yield
        finally:
            engine.policies.end_record()

    # --- looking ---------------------------------------------------------------------------------

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
        """``stats`` in Prometheus' text format.

        Raises:
            InvalidOption: prometheus_client is not installed.
        """
        return prometheus_text(self.engine.stats)

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
        and what is left of torch's own ops. Those of a body count for each call of it.

        ``draft_len`` None is the largest tier, ``rows`` None the tier of most rows.
        """
        engine, _ = self._open()
        draft_len = max(self._config.tiers) if draft_len is None else draft_len
        draft_len = plain(draft_len)
        check_tier(draft_len, engine.draft_lens)
        tiers = [tier for tier in engine.tiers.values() if tier.draft_len == draft_len]
        counts = {tier.key.rows: tier for tier in reversed(tiers) if tier.key.sampling == self._config.kind}
        if rows is not None and rows not in counts:
            raise InvalidOption(
                where="kernels", name="rows", value=rows, reason=f"there are tiers of {sorted(counts)} rows"
            )
        graph = counts[max(counts) if rows is None else rows].graph
        return kernels_called(graph, self.arena.device.type, self._config.backend.compiled_code(graph))

    def explain(self) -> str:
        """What was built and why, in plain words."""
        engine, _ = self._open()
        assert self._build is not None
        return explain(self._config, self._build, engine)

    # --- keeping ---------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a package to ``path``, one file, whole or not at all; :func:`speccompile.load` reads it.

        It holds the options given to ``wrap``, the captured graph, the steps built so far, and what Inductor made of
        the decoder layers, machine code included (which is compiled once more for it, some 20 s). It holds no weights
        and no requests. See :mod:`speccompile.package`.

        Raises:
            CannotSave: an option of ``wrap`` is code of your own: a logits processor, a policy, an acceptance rule.
            LoweringError: Inductor's caches are off, so that it leaves nothing to save, or it cannot compile.
            OSError: ``path`` cannot be written.
        """
        engine, target = self._open()
        assert self._build is not None
        if is_consumed(target.model):
            raise CannotSave(name="consume", reason="a package is matched with the model's own weights, which are gone")
        files = saved_files(
            target.model,
            self._build,
            self._config.backend,
            [*engine.tiers.values(), *engine.mixed_tiers.values(), *engine.prefill_tiers.values()],
        )
        # What "auto" took: steps and bodies are made for that one.
        given = {**self._given, "backend": self._config.backend.name}
        if (choice := self._config.choice) is not None:
            kept = {name: value for name, value in given.items() if name not in Auto.options}
            given = {**kept, "mode": choice.name, **choice.options}
        write_package(Path(path), make_manifest(target.model, given, files), files)

    # --- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End all requests, write records that wait, and let go of arena, executables and model; the model itself
        stays as it is.

        Raises:
            RecordsNotWritten: the disk does not take them.
        """
        engine, self._engine, self._build, self._target = self._engine, None, None, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> Speculator:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> tuple[Engine, Target]:
        if self._engine is None or self._target is None:
            raise Closed()
        return self._engine, self._target
