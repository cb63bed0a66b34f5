"""``spec.check``: is the text that of the plain decoder, and if not, how near a tie was the difference?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from speccompile.sampling.user import Processor

#: Stands for the token where a text has none any more.
END = -1


@dataclass(frozen=True)
class Difference:
    """Where one prompt's text first differs.

    ``position`` counts new tokens from 0. ``logit_change`` is the distance, in the model's own logits at that place, of
    the token that ought to have come from the one that did: the smallest change of one logit that explains it.
    """

    prompt: int
    position: int
    expected: int
    got: int
    logit_change: float

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt}: new token {self.position} is {self.got}, expected {self.expected}; "
            f"explained by a logit change of {self.logit_change:.3g}"
        )


@dataclass(frozen=True)
class CheckReport:
    """Outcome of ``spec.check``; true when every text was equal."""

    prompts: int
    reference: str
    differences: tuple[Difference, ...]

    def __bool__(self) -> bool:
        return not self.differences

    @property
    def largest_logit_change(self) -> float:
        """0.0 when nothing differs."""
        return max((difference.logit_change for difference in self.differences), default=0.0)

    def __str__(self) -> str:
        equal = self.prompts - len(self.differences)
        lines = [f"{equal} of {self.prompts} texts equal those of {self.reference}"]
        return "\n".join([*lines, *(str(difference) for difference in self.differences)])


def transformers_greedy(
    model: PreTrainedModel,
    prompt: list[int],
    max_new_tokens: int,
    eos: list[int],
    processors: Sequence[Processor] = (),
) -> list[int]:
    """New tokens of the model's own greedy ``generate`` for one prompt, with logits processors of the user's."""
    ids = torch.tensor([prompt], device=model.device)
    output = cast(Any, model).generate(
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
) -> Difference | None:
    """The first place where two continuations of ``prompt`` part, or None."""
    if expected == got:
        return None
    shorter = min(len(expected), len(got))
    position = next((i for i in range(shorter) if expected[i] != got[i]), shorter)
    if position == shorter:
        # One text ends where the other goes on, which no change of a logit explains.
        wanted, seen = (text[position] if position < len(text) else END for text in (expected, got))
        return Difference(index, position, wanted, seen, float("inf"))
    context = torch.tensor([prompt + expected[:position]], device=model.device)
    with torch.no_grad():
        scores = model(input_ids=context, use_cache=False).logits[:, -1].float()
        for processor in processors:
            scores = processor(context, scores)
        logits = scores[0].double()
    change = float((logits[expected[position]] - logits[got[position]]).abs())
    return Difference(index, position, expected[position], got[position], change)
