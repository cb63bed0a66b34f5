"""``Speculator.generate``, with the arguments and results of transformers' ``generate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation import GenerateDecoderOnlyOutput

from speccompile.errors import InvalidInput
from speccompile.multimodal.source import SourceEncoder
from speccompile.runtime.arguments import read_mask_or_config
from speccompile.runtime.generate import generate
from speccompile.runtime.listener import Streamer
from speccompile.runtime.request_options import GenerateOptions
from speccompile.runtime.target import EosTokens
from speccompile.speculator.base import SpeculatorBase
from speccompile.speculator.own_generate import own_generate
from speccompile.utils.not_given import NOT_GIVEN, NotGiven


class Generation(SpeculatorBase):
    """Decoding with the signature of transformers' ``generate``."""

    @overload
    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        mask_or_config: torch.Tensor | GenerationConfig | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        return_dict_in_generate: Literal[True],
        **options: Any,
    ) -> GenerateDecoderOnlyOutput: ...

    @overload
    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        mask_or_config: torch.Tensor | GenerationConfig | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        return_dict_in_generate: Literal[False] | None = None,
        **options: Any,
    ) -> torch.Tensor: ...

    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        mask_or_config: torch.Tensor | GenerationConfig | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        max_new_tokens: int | NotGiven | None = NOT_GIVEN,
        max_length: int | NotGiven | None = NOT_GIVEN,
        max_time: float | NotGiven | None = NOT_GIVEN,
        eos_token_id: EosTokens | NotGiven = NOT_GIVEN,
        pad_token_id: int | NotGiven | None = NOT_GIVEN,
        bos_token_id: int | NotGiven | None = NOT_GIVEN,
        num_return_sequences: int | NotGiven | None = NOT_GIVEN,
        num_draft_tokens: int | None = None,
        stop_strings: str | Sequence[str] | NotGiven | None = NOT_GIVEN,
        tokenizer: PreTrainedTokenizerBase | None = None,
        stopping_criteria: Any = None,
        streamer: Streamer | None = None,
        do_sample: bool | NotGiven | None = NOT_GIVEN,
        seed: int | None = None,
        return_dict_in_generate: bool | NotGiven | None = NOT_GIVEN,
        output_scores: bool | NotGiven | None = NOT_GIVEN,
        output_logits: bool | NotGiven | None = NOT_GIVEN,
        output_attentions: bool | NotGiven | None = NOT_GIVEN,
        output_hidden_states: bool | NotGiven | None = NOT_GIVEN,
        record: bool = True,
        adapter: str | Sequence[str | None] | None = None,
        **options: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Decode as ``model.generate`` does. Greedy decoding returns the same tokens, sampling has the same
        distribution.

        It submits its rows to ``spec.engine``, together with the engine's other requests. Other threads may use both
        meanwhile.

        A parameter whose default is ``NOT_GIVEN`` has the generation_config's value if it is not given. As in
        transformers, an explicit None switches off a value of the generation_config: ``eos_token_id=None`` means no EOS
        ids, ``do_sample=None`` is greedy.

        Args:
            input_ids: int64 ``[B, P]``, with padding where ``attention_mask`` is 0. Rows beyond ``max_batch`` wait for
                a slot. None means only the BOS token.
            mask_or_config: by position, the attention mask, or, as in transformers, a ``GenerationConfig``.
            attention_mask: ``[B, P]``, 0 at padding. Tokens at 0 are removed, also between other tokens. None marks the
                pad id as padding, unless it is an EOS id.
            inputs: transformers' name for ``input_ids``.
            generation_config: A ``GenerationConfig``, over which the other options take precedence. As in transformers,
                fields that it leaves at None are those of the model's generation_config.
            max_new_tokens: Most new tokens. Of each row; None: ``max_length``, else 20, as in transformers
                (``engine.submit``: 128). A row also ends at ``max_len``, with a warning.
            max_length: Most tokens, prompt included, where ``max_new_tokens`` is given nowhere. None means no such
                limit, and 20 new tokens if there is no other limit (in transformers an error, or no end).
            max_time: Seconds after which rows end with their next token. Counted from this call, as in transformers.
                None means no limit.
            eos_token_id: One or several ids that end a sequence.
            pad_token_id: The id that pads rows that end early. None means the first EOS id.
            bos_token_id: The id that is the prompt where there is no other.
            num_return_sequences: Continuations of each prompt. The prompt is read once; rows follow one another as
                transformers orders them. Without ``do_sample`` they are all equal. None means 1.
            num_draft_tokens: Most draft tokens of a step, 0 for none. None means as many as the tier has.
            stop_strings: One or several texts that end a sequence; they need ``tokenizer``. A row ends with the token
                that completes one.
            tokenizer: The tokenizer of the token ids. For ``stop_strings``.
            stopping_criteria: transformers' ``StoppingCriteria``, one or several. They are called after each token of
                each row with that row's ids and ``None`` for scores. With several rows each row has copies, as of
                ``logits_processor``. A copy receives ``[B, P + new]`` with this row's tokens in every line. If it
                returns a tensor, element i decides for row i; a bool decides for this row.
            streamer: A transformers streamer. It follows one row.
            do_sample: Whether tokens are drawn; otherwise the most likely one is chosen.
            seed: Seed of what is drawn. Row i draws as ``seed + i`` does. None draws a seed from torch's default
                generator. The same seed and options give the same text in any mode, at any tier, with or without other
                requests. Greedy text does not depend on the seed.
            return_dict_in_generate: Whether to return transformers' ``GenerateDecoderOnlyOutput``. It has no cache.
            output_scores: Whether to return the scores after all processors, of each new token. They are ``scores`` of
                the ``GenerateDecoderOnlyOutput``: for each new position float32 ``[B, V]``, 0 in rows that have ended,
                since no model ran for them. Needs ``return_dict_in_generate`` and ``wrap(scores=True)``.
            output_logits: Whether to return the model's own logits, of each new token. They are ``logits`` of the
                output, with the shapes and requirements of ``scores``.
            output_attentions: Refused if True: a step keeps no attentions.
            output_hidden_states: Refused if True: a step keeps no hidden states.
            record: Whether hidden states are saved, where the wrap saves them.
            adapter: The name of the LoRA adapter that the model has, or one for each prompt. A name of
                :attr:`adapters`; None means the model without adapters.
            options: the inputs of a vision-language model beside tokens, by the names of its forward (``pixel_values``,
                ...); options of the sampling pipeline, as :meth:`Engine.submit` accepts them; and the other parameters
                of transformers' ``generate`` at values without effect. Any other value is an error with the reason
                (:mod:`speccompile.runtime.arguments`). None for an option switches it off, as in transformers.
                ``logits_processor`` is called for each row separately, with the row's ids as transformers passes them,
                padding included. With one row these are the given objects. With several, each row has copies
                (``copy.deepcopy``; modules and tokenizers are shared), so processors with state do not mix rows. A
                processor receives one row, ``[1, L]``: one that indexes rows finds its row at 0. Functions are not
                copied. With several rows it is an error if a function changes an object that it holds (a closure's
                list, a global counter), or holds an object in which a change cannot be detected. For state, use a
                class, or ``engine.submit`` for each row.

        Returns:
            int64 ``[B, P + new]``, padded as in transformers; or the output that has it as ``sequences``.

        Raises:
            UserError: an argument is not valid; see the classes in ``speccompile.errors``.
        """
        if inputs is not None and input_ids is not None:
            raise InvalidInput(name="inputs", reason="input_ids is also given; give one of them")
        attention_mask, generation_config = read_mask_or_config(mask_or_config, attention_mask, generation_config)
        return self._generate(
            inputs if input_ids is None else input_ids,
            attention_mask,
            GenerateOptions(
                generation_config=generation_config,
                max_new_tokens=max_new_tokens,
                max_length=max_length,
                max_time=max_time,
                eos_token_id=eos_token_id,
                pad_token_id=pad_token_id,
                bos_token_id=bos_token_id,
                num_return_sequences=num_return_sequences,
                num_draft_tokens=num_draft_tokens,
                stop_strings=stop_strings,
                tokenizer=tokenizer,
                stopping_criteria=stopping_criteria,
                streamer=streamer,
                do_sample=do_sample,
                seed=seed,
                return_dict_in_generate=return_dict_in_generate,
                output_scores=output_scores,
                output_logits=output_logits,
                output_attentions=output_attentions,
                output_hidden_states=output_hidden_states,
                record=record,
                adapter=adapter,
                others=options,
            ),
        )

    def _generate(
        self, given: torch.Tensor | None, attention_mask: torch.Tensor | None, options: GenerateOptions
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Decode, by the method of the model's class where that is another one than transformers' common one."""
        engine, target = self._open()

        def common(given: torch.Tensor | None, attention_mask: torch.Tensor | None = None, **rest: Any) -> Any:
            return generate(engine, target, given, attention_mask, GenerateOptions.of(rest))

        piecewise = own_generate(target.model, common)
        if piecewise is None:
            return generate(engine, target, given, attention_mask, options)
        assert isinstance(target.encoder, SourceEncoder)
        keywords = options.keywords()
        target.encoder.check({target.encoder.main: given, **keywords})
        if given is not None:
            keywords[target.encoder.main] = given
        found: torch.Tensor = piecewise(attention_mask=attention_mask, **keywords)
        return found
