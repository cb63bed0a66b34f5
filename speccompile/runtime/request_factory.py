"""Creation of requests: arguments are checked, defaults filled in, records reserved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import StoppingCriteriaList

from speccompile.errors import InvalidOption
from speccompile.graph.arena import Arena
from speccompile.graph.keys import Kind
from speccompile.hidden_states.records import RecordSpec
from speccompile.multimodal.inputs import Features
from speccompile.runtime.adapter_table import AdapterTable
from speccompile.runtime.inputs import check_options, read_num_draft_tokens, read_prediction, read_prompt
from speccompile.runtime.listener import Listener, Streamer, check_streamer, check_tokenizer, make_criteria
from speccompile.runtime.options import StepTraits
from speccompile.runtime.params import Params
from speccompile.runtime.request import Driver, Request
from speccompile.runtime.request_options import SubmitOptions
from speccompile.runtime.saver import Saver
from speccompile.runtime.score_records import ExtraOutputs, Records, check_kept
from speccompile.runtime.stats import RequestStats
from speccompile.runtime.target import Target
from speccompile.utils.devices import traits_of

#: Builds the executables of a kind, for requests whose tokens are watched or not, if they are missing.
Prepare = Callable[[Kind, bool], None]


class RequestFactory:
    """Creates requests without queueing them.

    Args:
        adapters: adapters that requests can name.
        saver: saves hidden states of sequences; None if they are not saved.
        traits: those of the executables.
    """

    def __init__(
        self,
        target: Target,
        arena: Arena,
        adapters: AdapterTable,
        saver: Saver | None,
        traits: StepTraits,
    ) -> None:
        self._target = target
        self._adapters = adapters
        self._arena = arena
        self._saver = saver
        self._traits = traits

    def from_options(
        self,
        driver: Driver,
        prepare: Prepare,
        ids: Sequence[int] | torch.Tensor,
        options: SubmitOptions,
        inputs: Mapping[str, Any] | Features | None = None,
    ) -> Request:
        """Create the request of :meth:`~speccompile.runtime.engine.Engine.submit`.

        Raises:
            UserError: an argument is not valid.
        """
        where, layout = options.where, self._arena.layout
        check_options(options, options.sampling)
        self._target.check()
        prompt = read_prompt(ids, 0, layout)
        check_streamer(options.streamer)
        check_tokenizer(options.tokenizer)
        check_kept(where, "output_logits", options.output_logits, self._arena)
        check_kept(where, "output_scores", options.output_scores, self._arena)
        check_kept(where, "top_logprobs", options.top_logprobs, self._arena)
        if options.top_logprobs > layout.num_logits:
            reason = f"the model only has {layout.num_logits} tokens to choose from"
            raise InvalidOption(where=where, name="top_logprobs", value=options.top_logprobs, reason=reason)
        eos = self._target.eos(options.eos_token_id)
        params = Params(
            max_new_tokens=self._target.new_tokens(where, options.max_new_tokens, len(prompt)),
            eos=tuple(eos),
            sampling=self._target.sampling(
                where, options.sampling, do_sample=options.do_sample, seed=options.seed, eos=eos
            ),
            priority=options.priority,
            reuse=not options.prompt_logprobs,
            tokenizer=options.tokenizer,
            outputs=ExtraOutputs(
                options.logprobs,
                options.prompt_logprobs,
                options.output_logits,
                options.output_scores,
                options.top_logprobs,
            ),
            num_draft_tokens=read_num_draft_tokens(where, options.num_draft_tokens, layout),
            prediction=read_prediction(where, options.prediction, layout),
            adapter=self._adapters.find(where, options.adapter),
            client=Params.client if options.client is None else tuple(options.client),
            features=self._target.features_of_one(prompt, inputs),
        )
        criteria = make_criteria(options.stop, options.tokenizer, options.stopping_criteria)
        params = replace(params, record=self.reserve_record(where, options.record))
        try:
            return self.make(driver, prepare, prompt, params, torch.tensor([prompt]), options.streamer, criteria)
        except BaseException:
            self.cancel_record(params)
            raise

    def embed(self, ids: Sequence[int] | torch.Tensor, inputs: Mapping[str, Any]) -> Features | None:
        """Embed the images of a prompt.

        Raises:
            UserError: the prompt or the inputs are not valid.
        """
        self._target.check()
        return self._target.features_of_one(read_prompt(ids, 0, self._arena.layout), inputs)

    def reserve_record(self, where: str, record: bool | str) -> RecordSpec | None:
        """Reserve the record of a request, by its argument ``record``.

        Returns:
            The record; None if no hidden states of the request are saved.

        Raises:
            InvalidOption: ``record`` is an id and the wrap saves no hidden states, or a record of that id exists.
            RecordsNotWritten: an earlier record could not be written.
        """
        if self._saver is None:
            if isinstance(record, str):
                reason = "hidden states are not saved here; wrap with save_hidden_states=..."
                raise InvalidOption(where=where, name="record", value=record, reason=reason)
            return None
        if record is False:
            return None
        return RecordSpec(self._saver.writer.reserve(record if isinstance(record, str) else None))

    def cancel_record(self, params: Params) -> None:
        """Free the reserved record of ``params``."""
        if self._saver is not None and params.record is not None:
            self._saver.writer.cancel(params.record.id)

    def make(
        self,
        driver: Driver,
        prepare: Prepare,
        prompt: list[int],
        params: Params,
        shown: torch.Tensor,
        streamer: Streamer | None,
        criteria: StoppingCriteriaList,
    ) -> Request:
        """Create a request of checked ``params``, after the executables that it runs are built.

        Args:
            driver: steps for the request.
            prepare: builds the executables of a kind, if they are missing.
            shown: ``[1, P]``, the prompt as passed to streamers and criteria.

        Raises:
            UserError: the model cannot continue the prompt.
        """
        self._target.check_prompt(prompt, params.features)
        layout = self._arena.layout
        if params.sampling is not None:
            # On CUDA a guide's masks are computed before a step, captured or not.
            calls_host = self._target.calls_host and traits_of(self._arena.device).host_memory
            sampling = params.sampling.of_request(
                shown,
                len(prompt),
                params.eos,
                self._arena,
                calls_host=calls_host,
                only_chooses=self._target.only_chooses,
            )
            drafts = params.num_draft_tokens
            if sampling.restricts_each_token or (sampling.follows_before_steps and not self._traits.drafts_known):
                drafts = 0
            params = replace(params, sampling=sampling, num_draft_tokens=drafts)
        drawn = params.sampling is not None and params.sampling.draws_with(self._traits.drawn_options)
        params = replace(params, drawn=drawn)
        prepare(params.kind, not params.patient)
        most = min(params.max_new_tokens, layout.max_len - len(prompt))
        listener = Listener(shown, most, streamer, criteria)
        stats = RequestStats(layout.max_draft_len, prompt_tokens=len(prompt))
        return Request(driver, prompt, params, listener, stats, Records(params.outputs, self._arena, layout.num_logits))
