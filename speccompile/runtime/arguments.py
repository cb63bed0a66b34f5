"""Arguments of ``generate``: every parameter of transformers' ``generate`` and every field of ``GenerationConfig``.

Each name is in exactly one of these tables, so a name of transformers is never an unknown option:

==================  ===================================================================================
:data:`SUPPORTED`   ``generate`` does the same as transformers
``OPTIONS``         the sampling pipeline does the same (:mod:`speccompile.sampling`)
:data:`IGNORED`     any value: transformers itself reads it only in modes that are refused here
:data:`REFUSED`     neutral values are accepted; any other value is an error with the reason
==================  ===================================================================================
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from speccompile.errors import InvalidInput, InvalidOption, UnknownOption
from speccompile.errors.arguments import similar_option
from speccompile.runtime.request_options import GenerateOptions
from speccompile.sampling import OPTIONS
from speccompile.utils.numbers import python_numbers
from speccompile.utils.transformers_version import CACHE_NAMES

#: Parameters and fields that ``generate`` itself reads.
SUPPORTED = tuple(GenerateOptions.parameters())
#: Fields that ``generate`` reads and :meth:`Engine.submit` does not: a request is one sequence, has no tokenizer, and
#: its caller limits its time.
GENERATE_ONLY = ("num_return_sequences", "stop_strings", "max_time")

IGNORED = frozenset(
    {
        # Beam search.
        *("early_stopping", "length_penalty", "low_memory"),
        # Assisted generation.
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "speculation_type"),
        "max_matching_ngram_size",
        # Encoder-decoders.
        "decoder_start_token_id",
        # The origin of a config.
        "transformers_version",
    }
)


@dataclass(frozen=True)
class Refusal:
    """The reason why a parameter is refused.

    Args:
        reason: part of the error message, with the remedy if there is one.
        neutral: values without effect, in addition to None.
        changes_text: False if the text is the same with any value. A generation_config may then have any value, and
            the parameter is refused only as the caller's argument.
    """

    reason: str
    neutral: tuple[Any, ...] = ()
    changes_text: bool = True

    def passes(self, value: Any) -> bool:
        """Whether ``value`` has no effect, and is accepted."""
        value = python_numbers(value)
        return value is None or (isinstance(value, bool | int | float | str) and value in self.neutral)


_UNBUILT = "it changes the text and is not supported yet"
_BEAMS = "beam search is not supported; a slot decodes one sequence"
_CACHE = "the KV cache is part of the steps"
_COMPILED = "steps are compiled by speccompile.wrap; choose how with wrap(backend=...)"
_GUIDANCE = "classifier-free guidance is not supported; it runs the model twice for each token"


def _drafts(mode: str) -> str:
    return f"the drafter is chosen at wrap: speccompile.wrap(model, {mode})"


REFUSED: dict[str, Refusal] = {
    # Other search strategies.
    "num_beams": Refusal(_BEAMS, (1,)),
    "num_beam_groups": Refusal(_BEAMS, (1,)),
    "diversity_penalty": Refusal(_BEAMS, (0.0,)),
    "constraints": Refusal(_BEAMS),
    "force_words_ids": Refusal(_BEAMS),
    "penalty_alpha": Refusal("contrastive search is not supported", (0.0,)),
    "dola_layers": Refusal("decoding by contrasting layers is not supported"),
    "custom_generate": Refusal("the engine's own loop decodes"),
    "trust_remote_code": Refusal("no code is loaded; it belongs to custom_generate", (False,), changes_text=False),
    # Drafts.
    "assistant_model": Refusal(_drafts("mode='draft_target', draft=assistant_model"), changes_text=False),
    "assistant_tokenizer": Refusal(
        _drafts("mode='draft_target', draft=assistant_model") + ", of the target's own vocabulary", changes_text=False
    ),
    "prompt_lookup_num_tokens": Refusal(_drafts("mode='ngram'"), changes_text=False),
    "assistant_early_exit": Refusal(_drafts("mode='early_exit', exit_layer=..."), changes_text=False),
    "use_mtp": Refusal(_drafts("mode='mtp'"), (False,), changes_text=False),
    "is_assistant": Refusal(_drafts("mode='draft_target', draft=assistant_model"), (False,), changes_text=False),
    # Logits processors that are not part of the steps.
    "encoder_repetition_penalty": Refusal(_UNBUILT, (1.0,)),
    "encoder_no_repeat_ngram_size": Refusal(_UNBUILT, (0,)),
    "exponential_decay_length_penalty": Refusal(_UNBUILT),
    "top_h": Refusal(_UNBUILT),
    "forced_bos_token_id": Refusal(_UNBUILT),
    "forced_decoder_ids": Refusal("generate does not read it; give decoder_input_ids", changes_text=False),
    "guidance_scale": Refusal(_GUIDANCE, (1.0,)),
    "negative_prompt_ids": Refusal(_GUIDANCE),
    "negative_prompt_attention_mask": Refusal(_GUIDANCE),
    # The prompt.
    "token_healing": Refusal(_UNBUILT, (False,)),
    # The form of the computation.
    "synced_gpus": Refusal("one process decodes", (False,), changes_text=False),
    "use_cache": Refusal(_CACHE, (True,), changes_text=False),
    "cache_implementation": Refusal(f"{_CACHE}, allocated once, in the model's own dtype; leave it out", ("static",)),
    "cache_config": Refusal(_CACHE, changes_text=False),
    "max_cache_len": Refusal(f"{_CACHE}; give speccompile.wrap(model, max_len=...)", changes_text=False),
    "prefill_chunk_size": Refusal("prompts are cut into the chunks that wrap built", changes_text=False),
    "compile_config": Refusal(_COMPILED, changes_text=False),
    "disable_compile": Refusal(_COMPILED, (False,), changes_text=False),
    "continuous_batching_config": Refusal("spec.engine batches continuously", changes_text=False),
}

#: Fields that no generation_config may have.
CHANGE_TEXT = {name: refusal for name, refusal in REFUSED.items() if refusal.changes_text}
CHANGE_TEXT |= {name: Refusal("only generate reads it") for name in GENERATE_ONLY}
CHANGE_TEXT["num_return_sequences"] = Refusal("only generate reads it", (1,))
# The other kinds of cache do not change the text. If a checkpoint's config names one, the caller did not request it.
CHANGE_TEXT["cache_implementation"] = Refusal(
    f"{_CACHE}, in the model's own dtype", ("static", "dynamic", "sliding_window", "hybrid", "hybrid_chunked")
)


def read_by_generate(model: PreTrainedModel) -> tuple[str, ...]:
    """Fields of a generation_config that ``generate`` of ``model`` reads, and :meth:`Engine.submit` does not."""
    return (*GENERATE_ONLY, "forced_bos_token_id") if model.config.is_encoder_decoder else GENERATE_ONLY


_CODE = {"the model's generation_config": "model.generation_config"}


@dataclass(frozen=True)
class Settings:
    """The settings that apply if a request's own arguments do not set them.

    Args:
        config: the model's generation_config, or a copy with the caller's values.
        given: the generation_config that the caller gave.
        keywords: names of fields that the caller gave as keywords.
    """

    config: GenerationConfig
    given: GenerationConfig | None = None
    keywords: frozenset[str] = frozenset()

    def source(self, name: str) -> str:
        """Return the origin of a field's value, for messages."""
        if name in self.keywords:
            return "generate"
        return "the model's generation_config" if getattr(self.given, name, None) is None else "generation_config"

    def check(self, supported: Container[str] = ()) -> None:
        """Refuse fields that would change the text and are not supported.

        Args:
            supported: the names of :data:`GENERATE_ONLY` that the caller reads.

        Raises:
            InvalidOption: a field is refused; the error names it.
        """
        for name, refusal in CHANGE_TEXT.items():
            value = getattr(self.config, name, None)
            if name not in supported and not refusal.passes(value):
                source, neutral = self.source(name), refusal.neutral[0] if refusal.neutral else None
                reason = f"{refusal.reason}; set {_CODE.get(source, source)}.{name} = {neutral!r}"
                raise InvalidOption(where=source, name=name, value=value, reason=reason)


def read_mask_or_config(
    given: Any, attention_mask: torch.Tensor | None, generation_config: GenerationConfig | None
) -> tuple[torch.Tensor | None, GenerationConfig | None]:
    """Return ``attention_mask`` and ``generation_config``. ``given``, the second positional argument, is one of them.

    Raises:
        InvalidInput: that one is also given by name.
    """
    if given is None:
        return attention_mask, generation_config
    is_config = isinstance(given, GenerationConfig)
    if (generation_config if is_config else attention_mask) is not None:
        name = "generation_config" if is_config else "attention_mask"
        raise InvalidInput(name=name, reason="it is given twice, by position and by name; give it once")
    return (attention_mask, given) if is_config else (given, generation_config)


def read_settings(
    model: PreTrainedModel, generation_config: GenerationConfig | None, arguments: Mapping[str, Any]
) -> Settings:
    """Check the names, and merge values as transformers does: keywords over ``generation_config`` over the model's own.

    Args:
        arguments: the caller's keywords. As in transformers, None for an option switches it off, also if a
            generation_config has a value.

    Raises:
        InvalidOption: a value is refused; the error has its name and the reason.
        UnknownOption: a name is unknown; the error has the known names.
    """
    if not (generation_config is None or isinstance(generation_config, GenerationConfig)):
        reason = "it must be a transformers GenerationConfig, or None"
        raise InvalidOption(where="generate", name="generation_config", value=generation_config, reason=reason)
    _check_keywords(model, arguments)
    config = copy.copy(model.generation_config)
    if generation_config is not None:
        for name, value in vars(generation_config).items():
            if value is not None:
                setattr(config, name, value)
    keywords = set()
    for name, value in arguments.items():
        if name not in OPTIONS and name in vars(config):
            setattr(config, name, value)
            keywords.add(name)
        elif name in OPTIONS and value is None:
            # An option with a default would replace None by it.
            setattr(config, name, None if OPTIONS[name].default is None else OPTIONS[name].neutral)
    settings = Settings(config, generation_config, frozenset(keywords))
    settings.check(supported=read_by_generate(model))
    return settings


def _check_keywords(model: PreTrainedModel, arguments: Mapping[str, Any]) -> None:
    unknown, known = [], [*SUPPORTED, *OPTIONS]
    for name, value in arguments.items():
        if name in OPTIONS or name in SUPPORTED or name in IGNORED:
            continue
        if name in REFUSED:
            if not REFUSED[name].passes(value):
                raise InvalidOption(where="generate", name=name, value=value, reason=REFUSED[name].reason)
        elif name in CACHE_NAMES or name in inspect.signature(model.forward).parameters:
            if value is not None:
                reason = "a step has no model inputs except input_ids and attention_mask; leave it out"
                raise InvalidOption(where="generate", name=name, value=value, reason=reason)
        elif value is not None or similar_option(name, known):
            # None is ignored, as in transformers: a processor's output may have inputs of other models.
            unknown.append(name)
    if unknown:
        raise UnknownOption(where="generate", names=", ".join(sorted(unknown)), known=", ".join(known))
