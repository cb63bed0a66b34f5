"""The sampling options of one request: reads and checks them, and writes them into the state of its slot."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig

from speccompile.errors import IgnoredSetting, InvalidOption
from speccompile.graph.arena import Arena
from speccompile.ops.noise import SEEDS
from speccompile.sampling.allowed import AllowedTokens, AllowedTokensFunction
from speccompile.sampling.base import Option, equals
from speccompile.sampling.guide import FollowGuide, GuideFollower
from speccompile.sampling.host import CALLED_ON_HOST, HostCall, host_call
from speccompile.sampling.pipeline import (
    OPTIONS,
    PENALTIES,
    USED_PROCESSORS,
    all_processors,
    in_order,
)
from speccompile.sampling.replaced import replace_built_in
from speccompile.sampling.temperature import LEAST_TEMPERATURE
from speccompile.utils.numbers import python_numbers
from speccompile.utils.row_copies import own_copy
from speccompile.utils.warn import warn_caller


@dataclass(frozen=True)
class Sampling:
    """Options that have an effect, by name, and the seed of the draws.

    A request without such options has None instead, and runs the greedy executables, which have no processors. If the
    wrap has processors of the user's, all executables have processors, and the request has a ``Sampling`` without
    values. A submitted request has the Python code that the host calls in each of its steps (``host_call``), and what
    follows its guide (``follower``). With ``follows_in_steps`` steps call the follower; otherwise the host calls it
    before each of them.
    """

    values: Mapping[str, Any]
    seed: int = 0
    row: int = 0
    host_call: HostCall | None = None
    follower: GuideFollower | None = None
    follows_in_steps: bool = True

    def place(self, arena: Arena, slot: int, prompt_length: int) -> None:
        """Write the options into the state of ``slot``, which must be in its initial state."""
        arena.write("seed", slot, self.seed)
        if self.follower is not None and self.follows_in_steps:
            arena.write("guide_number", slot, self.follower.number)
        # The host writes the masks of a guide that it follows where those of such a function would be.
        masked = AllowedTokens.name if self.follows_before_steps else None
        columns = arena.layout.tensors[USED_PROCESSORS].columns
        used = set()
        for processor in all_processors(arena.layout.tensors):
            values = {
                option.name: self.values[option.name] for option in processor.options if option.name in self.values
            }
            if processor.name == masked or (values and processor.has_effect(values)):
                used.add(processor.name)
            if not values:
                continue
            for name, value in processor.place(values, prompt_length).items():
                arena.write(name, slot, value)
        arena.write(USED_PROCESSORS, slot, [name in used for name in columns])

    @property
    def asks(self) -> AllowedTokensFunction | None:
        """The function that the host calls before each of the request's tokens, or None."""
        return self.values.get("prefix_allowed_tokens_fn")

    def draws_with(self, options: frozenset[str]) -> bool:
        """Whether its tokens are drawn, and only ``options`` change its logits."""
        return "temperature" in self.values and self.values.keys() <= options

    @property
    def follows_before_steps(self) -> bool:
        """Whether the host writes the masks of its guide before each of its steps."""
        return self.follower is not None and not self.follows_in_steps

    @property
    def restricts_each_token(self) -> bool:
        """Whether the host restricts each of its tokens when the token before is known: its row has no drafts."""
        return self.asks is not None or any(name in self.values for name in CALLED_ON_HOST)

    @property
    def on_host(self) -> bool:
        """Whether the host is called for each of its steps."""
        return self.follows_before_steps or self.restricts_each_token

    def of_row(self, row: int, rows: int) -> Sampling:
        """The options of one of the rows of a batch, with its own seed and, for several rows, its own copies of the
        processors.

        Raises:
            InvalidOption: a processor cannot be copied.
        """
        values = self.values
        if rows > 1 and "logits_processor" in values:
            own = tuple(own_copy("logits_processor", processor, row) for processor in values["logits_processor"])
            values = {**values, "logits_processor": own}
        return Sampling(values, (self.seed + row) % SEEDS, row)

    def of_request(
        self,
        shown: torch.Tensor,
        prompt_length: int,
        eos: tuple[int, ...],
        arena: Arena,
        *,
        calls_host: bool,
        only_chooses: bool = False,
    ) -> Sampling:
        """These options with the :attr:`host_call` and the :attr:`follower` of a request.

        Args:
            shown: ``[1, P]``, the prompt, which may have padding.
            calls_host: whether steps may call the host.
            only_chooses: whether steps use scores only to choose tokens.
        """
        guide, follower = self.values.get("guide"), None
        if guide is not None:
            chooses = only_chooses and self.values.keys() <= _options_until(FollowGuide.name)
            follower = GuideFollower(guide, eos, arena.layout.vocab_size, prompt_length, chooses=chooses)
        return replace(
            self,
            host_call=host_call(self.values, shown, prompt_length, arena.layout.num_logits, arena.device),
            follower=follower,
            follows_in_steps=calls_host,
        )


def _options_until(name: str) -> frozenset[str]:
    """Options of the penalties up to the one of this name. They change scores before it."""
    found = set[str]()
    for processor in in_order(PENALTIES):
        found.update(option.name for option in processor.options)
        if processor.name == name:
            break
    return frozenset(found)


#: The fields of a generation_config that transformers reads.
_FIELDS = frozenset(vars(GenerationConfig()))


def read_sampling(
    where: str,
    given: Mapping[str, Any],
    *,
    do_sample: bool | None,
    seed: int | None,
    config: GenerationConfig,
    eos: list[int],
    vocab_size: int,
    num_logits: int,
    source: Callable[[str], str] = lambda _: "the model's generation_config",
) -> Sampling | None:
    """Check a request's options, and add those of the model's generation_config that transformers reads.

    Args:
        where: the called function, for messages.
        given: options by name; None is as if not given.
        do_sample: None is the value of the generation_config.
        seed: None draws one from torch's default generator, if the request draws tokens. Without draws it is not used.
        num_logits: the lm_head can choose the ids below it. Other ids of an option would have no score.
        source: returns where the value of an option in ``config`` is from, for messages.

    Raises:
        InvalidOption: an option is not valid.
    """
    draws = bool(config.do_sample) if do_sample is None else do_sample
    values: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        value, from_ = python_numbers(given.get(name)), where
        if value is None:
            from_ = source(name)
            value = _configured(option, python_numbers(getattr(config, name, None)), from_)
        elif option.draws and not (draws or option.is_neutral(value) or equals(value, option.default)):
            raise InvalidOption(where=where, name=name, value=value, reason="it needs do_sample=True")
        if option.draws and not draws:
            continue
        value = option.default if value is None else value
        if value is None:
            continue
        if problem := option.problem(value, vocab_size if option.forbids else num_logits):
            if option.problem(value, vocab_size) is None:
                problem += "; prompts may have it, but the lm_head does not choose it"
            raise InvalidOption(where=from_, name=name, value=value, reason=problem)
        if not option.is_neutral(value):
            values[name] = value
    if draws and values["temperature"] < LEAST_TEMPERATURE:
        # The greatest score is chosen, whatever these options are.
        values = {name: value for name, value in values.items() if not OPTIONS[name].draws}
    if "bad_words_ids" in values:
        # As in transformers: EOS tokens stay possible.
        words = [word for word in values.pop("bad_words_ids") if list(word) not in [[item] for item in eos]]
        values |= {"bad_words_ids": words} if words else {}
    if "logits_processor" in values:
        given_processors = values["logits_processor"]
        values["logits_processor"] = (
            tuple(given_processors) if isinstance(given_processors, list | tuple) else (given_processors,)
        )
        values = replace_built_in(
            where, values, [option.name for item in in_order(PENALTIES) for option in item.options]
        )
    if "guide" in values and not eos:
        reason = "a sequence with a guide ends with an EOS token, and neither the model nor the request has one"
        raise InvalidOption(where=where, name="guide", value=values["guide"], reason=reason)
    if not values:
        return None
    if seed is None:
        seed = int(torch.randint(SEEDS - 1, ())) if values.get("temperature") else 0
    return Sampling(values, seed)


def _configured(option: Option, value: Any, source: str) -> Any:
    """The value of an option in a generation_config; None, with a warning, if transformers does not read it there."""
    if value is None or option.name in _FIELDS:
        return value
    if not option.is_neutral(value):
        _warn_unread(option.name, repr(value), source)
    return None


@functools.cache
def _warn_unread(name: str, value: str, source: str) -> None:
    """Warn once in a process."""
    warn_caller(
        f"{source} has {name}={value}, which has no effect: transformers does not read {name} there. To apply it, give "
        f"{name} to each request.",
        IgnoredSetting,
    )
