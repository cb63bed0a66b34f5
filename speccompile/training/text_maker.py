"""Draws user turns, submits them for answers, and decides about the texts in order.

Source of drawn user turns: Magpie (arXiv 2406.08464), section 2. An aligned model continues the beginning of its chat
template with a user turn.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from speccompile.errors import NoTexts
from speccompile.runtime.request import Request
from speccompile.speculator.speculator import Speculator
from speccompile.training.chat import Chat
from speccompile.training.filters import Exclusion, repeats, turn_key, words
from speccompile.training.text_files import Progress, TrainingText
from speccompile.training.text_options import TextOptions
from speccompile.training.text_writer import TextWriter

#: Seconds between saves of new texts.
SAVE_SECONDS = 20.0
#: Number of consecutive dropped texts after which the maker gives up.
MOST_DROPPED = 256


@dataclass
class _Draft:
    """A text while it is written.

    While the target writes the user turn, which begins with ``beginning``, there is no ``user``. ``key`` identifies the
    user turn.
    """

    number: int
    request: Request
    user: str | None = None
    key: bytes | None = None
    beginning: Sequence[int] = ()


@dataclass(frozen=True)
class _Decided:
    """A finished text, or the reason to drop it.

    ``key`` identifies a user turn that was submitted for an answer. Duplicates are detected when all texts before are
    decided. Counts by reason thus do not depend on the order in which requests end.
    """

    text: TrainingText | str
    key: bytes | None = None


class TextMaker:
    """Keeps the slots busy, and decides about the texts in the order of their numbers.

    A user turn is a duplicate if a kept text before it has the same one. The decision depends on no other texts.
    """

    def __init__(
        self,
        spec: Speculator,
        chat: Chat,
        options: TextOptions,
        prompts: list[str],
        beginnings: list[list[int]],
        excluded: Exclusion,
        writer: TextWriter,
    ) -> None:
        self._engine, self._chat, self._options = spec.engine, chat, options
        self._prompts, self._beginnings = prompts, beginnings
        self._excluded, self._writer = excluded, writer
        slots = spec.arena.layout.max_batch
        self._at_once = slots + min(slots, spec.engine.options.max_waiting)
        self._dropped = Counter(writer.progress.dropped)
        self._known = {self._key_of(text) for text in writer.there()}
        self._in_a_row: Counter[str] = Counter()
        self._drafts: dict[int, _Draft] = {}
        self._decided: dict[int, _Decided] = {}
        #: Number of the next text to decide, and numbers of the next texts to begin.
        self._next = writer.progress.next
        self._numbers = self._all_numbers(self._next)

    def _all_numbers(self, first: int) -> Iterator[int]:
        number = first
        while number < len(self._prompts) or self._options.draws:
            yield number
            number += 1

    def _key_of(self, text: TrainingText) -> bytes:
        return self._key(text.input_ids.tolist(), text.answer_start)

    def _key(self, ids: list[int], answer_start: int) -> bytes:
        # Computed from ids, which is all that a folder stores.
        return turn_key(self._chat.user_turn(ids, answer_start))

    def run(self, bar: tqdm[Any]) -> None:
        """Write texts until there are enough tokens, or until the prompts are used up."""
        saved = time.monotonic()
        while self._writer.tokens < self._options.tokens:
            self._begin()
            if not self._drafts and not self._decided:
                return
            if self._drafts:
                self._engine.step()
            for draft in [draft for draft in self._drafts.values() if draft.request.finished]:
                self._finish_draft(draft)
            while self._next in self._decided and self._writer.tokens < self._options.tokens:
                self._commit(self._decided.pop(self._next), bar)
            if time.monotonic() - saved > SAVE_SECONDS:
                self._writer.save()
                saved = time.monotonic()

    def cancel(self) -> None:
        """Cancel all requests in the engine."""
        for draft in self._drafts.values():
            draft.request.cancel()

    def _begin(self) -> None:
        """Submit texts until enough of them run or wait."""
        while len(self._drafts) < self._at_once and (number := next(self._numbers, None)) is not None:
            if number < len(self._prompts):
                self._answer(number, self._prompts[number])
            else:
                beginning = self._beginning(number)
                self._drafts[number] = _Draft(number, self._draw(number, beginning), beginning=beginning)

    def _beginning(self, number: int) -> Sequence[int]:
        """Beginning of a drawn user turn; empty for every second one."""
        if not self._beginnings or number % 2 == 0:
            return ()
        return self._beginnings[number // 2 % len(self._beginnings)]

    def _draw(self, number: int, beginning: Sequence[int]) -> Request:
        chat, options = self._chat, self._options
        return self._engine.submit(
            [*chat.opening, *beginning],
            max_new_tokens=options.max_user_tokens - len(beginning),
            eos_token_id=list(chat.ends),
            stop=chat.stop,
            tokenizer=chat.tokenizer,
            priority=-number,
            record=False,
            **_sampling(options.user_temperature, options.user_top_p, options.seed, f"user {number}"),
        )

    def _answer(self, number: int, user: str) -> None:
        chat, options = self._chat, self._options
        prompt = chat.prompt(user)
        key = self._key(prompt, len(prompt))
        if reason := self._problem(user, prompt):
            self._decided[number] = _Decided(reason)
            return
        if key in self._known:
            self._decided[number] = _Decided("duplicate", key)
            return
        request = self._engine.submit(
            prompt,
            max_new_tokens=options.max_answer_tokens,
            eos_token_id=list(chat.ends),
            priority=-number,
            record=False,
            **_sampling(options.temperature, options.top_p, options.seed, f"answer {number}"),
        )
        self._drafts[number] = _Draft(number, request, user, key)

    def _problem(self, user: str, prompt: list[int]) -> str | None:
        """Reason not to answer a user turn, or None. ``prompt`` are its ids in the template."""
        if not words(user):
            return "empty"
        if len(prompt) > self._chat.overhead + self._options.max_user_tokens:
            return "long"
        return "excluded" if self._excluded.matches(user) else None

    def _finish_draft(self, draft: _Draft) -> None:
        """Process a draft whose request has ended: submit the next request, or decide about the text."""
        del self._drafts[draft.number]
        result = draft.request.result()
        if draft.user is not None:
            self._decided[draft.number] = _Decided(self._judged(draft, draft.user, result.token_ids), draft.key)
            return
        turn = [*draft.beginning, *result.token_ids]
        if result.finish_reason not in ("eos", "stop"):
            self._decided[draft.number] = _Decided("long")
        elif repeats(turn):
            self._decided[draft.number] = _Decided("repetition")
        else:
            self._answer(draft.number, self._chat.drawn_turn(turn))

    def _judged(self, draft: _Draft, user: str, tokens: list[int]) -> TrainingText | str:
        """Text of a user turn and the ``tokens`` of its answer, or the reason to drop it."""
        answer = str(self._chat.tokenizer.decode(tokens, skip_special_tokens=True))
        if not words(answer):
            return "empty"
        if repeats(tokens):
            return "repetition"
        if self._excluded.matches(user, answer):
            return "excluded"
        prompt = draft.request.prompt
        return TrainingText(torch.tensor([*prompt, *tokens]), len(prompt), draft.number)

    def _commit(self, decided: _Decided, bar: tqdm[Any]) -> None:
        """Append the next text, or count its reason."""
        self._next += 1
        text = "duplicate" if decided.key in self._known else decided.text
        accepted = None if isinstance(text, str) else text
        if isinstance(text, str):
            self._dropped[text] += 1
            self._in_a_row[text] += 1
        else:
            self._in_a_row.clear()
            self._known.add(self._key_of(text))
        self._writer.add(accepted, Progress(self._next, dict(self._dropped)))
        if self._next > len(self._prompts) and self._in_a_row.total() >= MOST_DROPPED:
            raise NoTexts(count=self._in_a_row.total(), reasons=counts(self._in_a_row))
        bar.update(0 if accepted is None else len(accepted.input_ids))
        bar.set_postfix(texts=self._writer.texts, dropped=self._dropped.total(), refresh=False)


def counts(dropped: Mapping[str, int]) -> str:
    """Format counts, such as ``3 duplicate, 1 long``."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "none"


def _sampling(temperature: float, top_p: float, seed: int, what: str) -> dict[str, Any]:
    """Options of ``submit``. They replace those of the generation_config."""
    if temperature == 0:
        return {"do_sample": False}
    own = int.from_bytes(hashlib.sha256(f"{seed} {what}".encode()).digest()[:8], "little") >> 1
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0, "seed": own}
