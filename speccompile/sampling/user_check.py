"""What is let into the graph of a user's own logits processors, and why the rest is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from speccompile.errors import InvalidOption, UnsupportedProcessor, UserError, error_line
from speccompile.sampling.user import Processor, ProcessorTrace, UserProcessor, texts_in_front, trace
from speccompile.utils.torch_private import DataDependentOutputException, DynamicOutputShapeException

#: Rows of a call, and the longest context that a processor may require.
ROWS = 4
MAX_LEAST = 16
#: Texts of these lengths are compared, besides the shortest, the longest, and those that a processor's branches name.
LENGTHS = (1, 2, 3, 7, 33)
#: Most ids and most sequences that texts are composed of.
MAX_TOKENS = 32

CALLED = "It is called as processor(input_ids, scores), with int64 [B, P] and float32 [B, V]"
AS_OPS = (
    "Write it with tensor operations alone (torch.where in place of `if`, comparisons in place of loops over tokens) "
    "and without memory of its own"
)
NO_LENGTHS = (
    "In the graph a text stands at the end of its row, its first token repeated before it: positions, counts and "
    "lengths cannot be told"
)
#: transformers' own processors whose work an option of a request does.
BUILT_IN = {
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id",
    "MinLengthLogitsProcessor": "min_new_tokens",
    "MinNewTokensLengthLogitsProcessor": "min_new_tokens",
    "NoBadWordsLogitsProcessor": "bad_words_ids",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size",
    "SequenceBiasLogitsProcessor": "sequence_bias",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
}


def check_processors(
    given: Any, *, vocab_size: int, max_len: int, places: int, device: torch.device
) -> tuple[UserProcessor, ...]:
    """Trace each processor, and compare what was traced with the processor itself.

    Args:
        given: a processor, a list of them (transformers' ``LogitsProcessorList`` is one), or None.
        vocab_size: V.
        max_len: most tokens of a text.
        places: columns of a row in the graph, more than ``max_len``.
        device: of the scores.

    Raises:
        InvalidOption: it is neither of these.
        UnsupportedProcessor: says which one, why, and what to do.
    """
    items = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    for item in items:
        if not callable(item):
            reason = "it has to be a LogitsProcessor or a list of them, callable with (input_ids, scores)"
            raise InvalidOption(where="wrap", name="logits_processor", value=item, reason=reason)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        return tuple(_Check(item, vocab_size, max_len, places, device).run() for item in items)


class _Check:
    """Of one processor."""

    def __init__(self, processor: Processor, vocab: int, max_len: int, places: int, device: torch.device) -> None:
        self.processor = processor
        self.name = getattr(processor, "__name__", type(processor).__name__)
        self.vocab, self.max_len, self.places, self.device = vocab, max_len, places, device
        self.generator = torch.Generator().manual_seed(0)

    def run(self) -> UserProcessor:
        least = self._least()
        length = min(least + 6, self.max_len)
        self._check_memory(length)
        self._check_rows(length)
        traced = self._trace()
        for text in self._texts(traced, least):
            self._compare(traced, text)
        return UserProcessor(self.name, self.processor, traced.function, traced.held, least)

    def _least(self) -> int:
        """The shortest context that it accepts: a processor that reads the last two tokens fails for one."""
        for length in range(1, min(MAX_LEAST, self.max_len) + 1):
            try:
                # Some prepare themselves in the first call: let it be this one.
                self.processor(self._ids(ROWS, length), self._scores(ROWS))
                return length
            except Exception as error:
                failure = error
        raise self._refusal(f"called with input_ids [{ROWS}, {length}] it raises {error_line(failure)}") from failure

    def _check_memory(self, length: int) -> None:
        ids, scores = self._ids(ROWS, length), self._scores(ROWS)
        before = _snapshots(self.processor)
        first = self._call(ids, scores)
        # In between another shape: what is kept for one may be made anew for the next.
        self._call(self._ids(ROWS - 1, self.max_len), self._scores(ROWS - 1))
        if not _same(first, self._call(ids, scores)):
            raise self._refusal("called twice with the same tensors it returns different ones", AS_OPS)
        if changed := _changed(before, _snapshots(self.processor)):
            raise self._refusal(f"a call changes its {changed}, and a graph keeps nothing for the next call", AS_OPS)

    def _check_rows(self, length: int) -> None:
        ids, scores = self._ids(ROWS, length), self._scores(ROWS)
        together = self._call(ids, scores)
        for row in range(ROWS):
            if not _same(self._call(ids[row : row + 1], scores[row : row + 1]), together[row : row + 1]):
                advice = "A row is its own request, and its text must not depend on its neighbours"
                raise self._refusal("what it returns for a row depends on the other rows", advice)

    def _trace(self) -> ProcessorTrace:
        attributes = _attributes(self.processor)
        before, saved = _snapshots(self.processor), dict(attributes)
        # Equal sizes would be taken for the same one.
        rows = ROWS - 1 if self.places != ROWS - 1 else ROWS
        try:
            traced = trace(self.processor, self._ids(rows, self.places), self._scores(rows))
        except DataDependentOutputException as error:
            reason = "it looks at the values of tensors in Python (an `if`, a loop, .item() or .tolist())"
            raise self._refusal(f"it cannot be traced: {reason}", AS_OPS) from error
        except DynamicOutputShapeException as error:
            reason = f"the size of a tensor depends on values ({error.func}, as in scores[mask] -= 1)"
            raise self._refusal(f"it cannot be traced: {reason}", AS_OPS) from error
        except Exception as error:
            raise self._refusal(f"it cannot be traced: {error_line(error)}", AS_OPS) from error
        finally:
            if changed := _changed(before, _snapshots(self.processor)):
                # Nothing of a trace may stay in what is the user's.
                attributes.clear()
                attributes.update(saved)
        if changed:
            raise self._refusal(f"a call changes its {changed}, and a graph keeps nothing for the next call", AS_OPS)
        return traced

    def _texts(self, traced: ProcessorTrace, least: int) -> Iterator[torch.Tensor]:
        """Contexts ``[P]``: random ones, and those made of what the processor looks for, which could be seen in the
        padding."""
        named = [number + step for number in traced.lengths for step in (-1, 0, 1)]
        lengths = {*LENGTHS, *named, least, self.max_len // 2, self.max_len} & {*range(least, self.max_len + 1)}
        tokens = torch.tensor(sorted(traced.tokens)) if traced.tokens else self._ids(1, MAX_TOKENS)[0].cpu()
        tokens = tokens[torch.randperm(len(tokens), generator=self.generator)[:MAX_TOKENS]]
        texts = [token.expand(length) for token in tokens for length in (1, 2)]
        for length in sorted(lengths):
            chosen = torch.randint(len(tokens), (2, length), generator=self.generator)
            texts += [*self._ids(2, length).cpu(), *tokens[chosen]]
        sequences = [row for tensor in traced.sequences for row in torch.atleast_2d(tensor).flatten(0, -2)[:MAX_TOKENS]]
        for sequence in sequences[:MAX_TOKENS]:
            whole = sequence[-MAX_TOKENS:].long().clamp(0, self.vocab - 1).cpu()
            texts += [whole[start:] for start in range(len(whole))]
        for text in texts:
            if least <= len(text) <= self.max_len:
                yield text.to(self.device)

    def _compare(self, traced: ProcessorTrace, text: torch.Tensor) -> None:
        """The trace over rows as the graph has them, among others, with the processor over the text alone."""
        other = self._ids(1, self.max_len)[0]
        context = torch.zeros(ROWS, self.places, dtype=torch.int64, device=self.device)
        context[0, : len(text)] = text
        context[1:, : len(other)] = other
        lengths = torch.tensor([len(text)] + [len(other)] * (ROWS - 1), device=self.device)
        scores = self._scores(ROWS)
        expected = self._call(text[None], scores[:1])
        rows = texts_in_front(context, lengths[:, None])
        for count in (1, ROWS):
            try:
                got = traced.function(rows[:count], scores[:count].clone(), *traced.held)
            except Exception as error:
                reason = f"its trace does not fit {count} row{'s' * (count > 1)} ({error_line(error)})"
                raise self._refusal(f"{reason}: it counts rows, or loops over them, in Python", AS_OPS) from error
            if not _same(got[:1], expected):
                tokens = f"{len(text)} token{'s' * (len(text) > 1)}"
                reason = f"its result for a text of {tokens} changes when the text is padded to {self.places}"
                raise self._refusal(f"{reason}: it depends on padding", NO_LENGTHS)

    def _call(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """What the processor itself returns for copies of these."""
        own = ids.clone()
        try:
            result: Any = self.processor(own, scores.clone())
        except Exception as error:
            raise self._refusal(f"called with input_ids {list(ids.shape)} it raises {error_line(error)}") from error
        form = f"scores like those it gets, float32 {list(scores.shape)} on {self.device}"
        if not isinstance(result, torch.Tensor):
            raise self._refusal(f"it returns {type(result).__name__}", f"It has to return {form}")
        if (result.shape, result.dtype, result.device) != (scores.shape, scores.dtype, scores.device):
            seen = f"{str(result.dtype).removeprefix('torch.')} {list(result.shape)} on {result.device}"
            raise self._refusal(f"it returns {seen}", f"It has to return {form}")
        if not torch.equal(own, ids):
            raise self._refusal("it writes into input_ids", "Work on input_ids.clone()")
        return result.clone()

    def _refusal(self, reason: str, advice: str = CALLED) -> UserError:
        if option := BUILT_IN.get(self.name):
            advice = f"What it does is built in: leave it out, and give {option}=... to generate or submit"
        return UnsupportedProcessor(name=self.name, reason=reason, advice=advice)

    def _ids(self, rows: int, length: int) -> torch.Tensor:
        return torch.randint(self.vocab, (rows, length), generator=self.generator).to(self.device)

    def _scores(self, rows: int) -> torch.Tensor:
        """In some rows some are forbidden already, as by another processor."""
        scores = 3 * torch.randn(rows, self.vocab, generator=self.generator)
        forbidden = torch.rand(rows, self.vocab, generator=self.generator) < 0.2
        forbidden &= torch.rand(rows, 1, generator=self.generator) < 0.5
        return scores.masked_fill(forbidden, float("-inf")).to(self.device)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Rows of another count may be added up in another order.
    return one.shape == other.shape and bool(torch.isclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True).all())


def _attributes(processor: Processor) -> dict[str, Any]:
    # Some callables have none.
    attributes: dict[str, Any] = getattr(processor, "__dict__", {})
    return attributes


def _snapshots(processor: Processor) -> dict[str, Any]:
    """Its attributes in a form that differs when one of them was changed, in place too."""
    return {name: _snapshot(value) for name, value in _attributes(processor).items()}


def _snapshot(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, dict):
        return [(_snapshot(key), _snapshot(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [_snapshot(item) for item in value]
    return repr(value) if isinstance(value, int | float | str) else id(value)


def _changed(before: dict[str, Any], after: dict[str, Any]) -> str:
    names = before.keys() | after.keys()
    return ", ".join(sorted(f"{name!r}" for name in names if before.get(name) != after.get(name)))
