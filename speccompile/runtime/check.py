"""``spec.check``: comparison of texts with those of the plain decoder, with the cause of a difference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from speccompile.adapters.loaded import Adapter
from speccompile.adapters.own_forward import adapted
from speccompile.graph_capture.altering import altering
from speccompile.graph_capture.packed_forward import as_packed
from speccompile.graph_capture.rounded_kv import rounding_kv
from speccompile.runtime.engine import Engine
from speccompile.runtime.generate import decode
from speccompile.runtime.params import Params
from speccompile.runtime.policy_controller import Fixed
from speccompile.runtime.target import Target
from speccompile.sampling.user import Processor

Reference = Literal["transformers", "plain"]

#: The token after the end of a sequence.
END = -1
#: The relative size of an embedding's last bits, and the number of perturbations.
LAST_BITS = 1e-7
PERTURBATIONS = 4


@dataclass(frozen=True)
class Difference:
    """The first difference between the two continuations of one prompt.

    ``position`` counts new tokens from 0. ``logit_change`` is the difference, in the model's own logits at that
    position, between the expected token and the chosen one: the smallest change of one logit that explains it.
    ``rounding`` is the change of that difference when the last bits of the model's embeddings change. It is tiny,
    unless the model rounds its inputs in its forward (``weights="int8"``).
    """

    prompt: int
    position: int
    expected: int
    got: int
    logit_change: float
    rounding: float = 0.0

    def __str__(self) -> str:
        alone = f", of which rounding by itself causes {self.rounding:.3g}" if self.rounding else ""
        return (
            f"prompt {self.prompt}: new token {self.position} is {self.got}, expected {self.expected}; "
            f"explained by a logit change of {self.logit_change:.3g}{alone}"
        )


@dataclass(frozen=True)
class TextOf:
    """A query for a model's own greedy continuation."""

    prompt: list[int]
    max_new_tokens: int
    eos: list[int]


@dataclass(frozen=True)
class DifferenceOf:
    """A query for the logit change that explains the difference of two continuations."""

    index: int
    prompt: list[int]
    expected: list[int]
    got: list[int]


#: Answers a query: new tokens, or a :class:`Difference`, or None if there is no difference.
Answer = Callable[[TextOf | DifferenceOf], Any]


@dataclass(frozen=True)
class CheckReport:
    """The result of ``spec.check``. It is true if all texts are equal."""

    prompts: int
    reference: str
    differences: tuple[Difference, ...]

    def __bool__(self) -> bool:
        return not self.differences

    @property
    def largest_logit_change(self) -> float:
        """The largest change of all differences; 0.0 without any."""
        return max((difference.logit_change for difference in self.differences), default=0.0)

    def __str__(self) -> str:
        equal = self.prompts - len(self.differences)
        lines = [f"{equal} of {self.prompts} texts equal those of {self.reference}"]
        return "\n".join([*lines, *(str(difference) for difference in self.differences)])


def check_texts(
    engine: Engine,
    target: Target,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    eos: list[int],
    reference: Reference,
    answer: Answer,
    adapter: Adapter | None = None,
) -> CheckReport:
    """Decode each of ``prompts`` separately, by ``engine`` and by the reference, both with ``adapter``.

    Args:
        answer: :func:`answer_of` of ``target``. For a sharded model it runs on all ranks.
    """
    if adapter is not None:
        own_forward = partial(adapted, target.model, engine.adapters.pairs(adapter))
        answer = partial(answer_of, target, own_forward=own_forward)
    differences = []
    for index, prompt in enumerate(prompts):
        most = min(max_new_tokens, engine.arena.layout.max_len - len(prompt))
        # Prefix reuse is off: KV of the checked sequence must not be used by the reference.
        sampling = target.sampling("check", {}, do_sample=False, seed=None, eos=eos)
        params = Params(most, tuple(eos), sampling, patient=True, reuse=False, adapter=adapter)
        got = decode(engine, [prompt], params)[0].new_tokens
        if reference == "transformers":
            expected = answer(TextOf(prompt, most, eos))
        else:
            policy, engine.policy = engine.policy, Fixed(0)
            try:
                expected = decode(engine, [prompt], params)[0].new_tokens
            finally:
                engine.policy = policy
        difference = None if expected == got else answer(DifferenceOf(index, prompt, expected, got))
        if difference is not None:
            differences.append(difference)
    name = "transformers' greedy generate" if reference == "transformers" else "the K=0 tier"
    return CheckReport(len(prompts), name, tuple(differences))


def answer_of(
    target: Target,
    question: TextOf | DifferenceOf,
    own_forward: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
) -> Any:
    """Answer a query with the target's own forward, with the weights, keys and values that steps compute with.

    Args:
        own_forward: a context that is entered around the forward.
    """
    processors = [processor.original for processor in target.processors]
    with as_packed(target.model, target.packs), rounding_kv(target.kv), own_forward():
        if isinstance(question, TextOf):
            sequence = question.prompt, question.max_new_tokens, question.eos
            return transformers_greedy(target.model, *sequence, processors)
        where = question.index, question.prompt, question.expected, question.got
        rounds = target.packs.rounds or target.kv is not None
        return first_difference(target.model, *where, processors, rounds=rounds, use_cache=target.kv is not None)


def transformers_greedy(
    model: PreTrainedModel,
    prompt: list[int],
    max_new_tokens: int,
    eos: list[int],
    processors: Sequence[Processor] = (),
) -> list[int]:
    """Return new tokens of the model's own greedy ``generate`` for one prompt, with the user's logits processors."""
    ids = torch.tensor([prompt], device=model.device)
    # The method of the class is called: a caller may have set model.generate = spec.generate.
    output = cast(Any, type(model)).generate(
        model,
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
        logits_processor=LogitsProcessorList(processors),
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def first_difference(
    model: PreTrainedModel,
    index: int,
    prompt: list[int],
    expected: list[int],
    got: list[int],
    processors: Sequence[Processor] = (),
    *,
    rounds: bool = False,
    use_cache: bool = False,
) -> Difference | None:
    """Return the first position at which two continuations of ``prompt`` differ, or None.

    Args:
        rounds: also compute :attr:`Difference.rounding`.
        use_cache: of the forward. In :func:`~speccompile.graph_capture.rounded_kv.rounding_kv` it must be True.
    """
    if expected == got:
        return None
    shorter = min(len(expected), len(got))
    position = next((i for i in range(shorter) if expected[i] != got[i]), shorter)
    if position == shorter:
        # One sequence ends where the other continues. No change of a logit explains that.
        expected_token, got_token = (text[position] if position < len(text) else END for text in (expected, got))
        return Difference(index, position, expected_token, got_token, float("inf"))
    context = torch.tensor([prompt + expected[:position]], device=model.device)

    def distance() -> float:
        with torch.no_grad():
            scores = model(input_ids=context, use_cache=use_cache).logits[:, -1].float()
            for processor in processors:
                scores = processor(context, scores)
        logits = scores[0].double()
        return float(logits[expected[position]] - logits[got[position]])

    unperturbed = distance()
    rounding = max(abs(perturbed - unperturbed) for perturbed in _perturbed(model, distance)) if rounds else 0.0
    return Difference(index, position, expected[position], got[position], abs(unperturbed), rounding)


def _perturbed(model: PreTrainedModel, compute: Callable[[], float]) -> list[float]:
    """Results of ``compute`` with perturbed last bits of the embeddings."""
    generator = torch.Generator(model.device).manual_seed(0)

    def perturb(_module: torch.nn.Module, _inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(embedded.shape, generator=generator, device=embedded.device)
        # In half precision the last bit is larger.
        share = max(LAST_BITS, torch.finfo(embedded.dtype).eps)
        return embedded * (1 + share * noise).to(embedded.dtype)

    with altering(model):
        handle = model.get_input_embeddings().register_forward_hook(perturb)
        try:
            return [compute() for _ in range(PERTURBATIONS)]
        finally:
            handle.remove()
