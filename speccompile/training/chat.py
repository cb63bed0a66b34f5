"""Token ids that a tokenizer's chat template adds around one user turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidInput
from speccompile.utils.mistral_common import is_mistral_common

#: Placeholder of a message when the template is analysed.
_MESSAGE = "THE-MESSAGE"


@dataclass(frozen=True)
class Chat:
    """Token ids that the template adds around a user turn.

    Args:
        opening: before the user turn. The target continues them with a user turn (Magpie).
        closing: after the user turn, up to the beginning of the answer.
        ends: ids that end a turn.
        stop: text that ends a user turn, if no special token does.
    """

    tokenizer: PreTrainedTokenizerBase
    opening: tuple[int, ...]
    closing: tuple[int, ...]
    ends: tuple[int, ...]
    stop: str | None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, eos: Sequence[int]) -> Chat:
        """Analyse the chat template of ``tokenizer``.

        Args:
            eos: ids that end the target's texts.

        Raises:
            InvalidInput: the tokenizer has no chat template, or it changes the messages.
        """
        if is_mistral_common(tokenizer):
            reason = "mistral-common writes conversations only as tokens; use a checkpoint with tokenizer.json"
            raise InvalidInput(name="the tokenizer", reason=reason)
        if getattr(tokenizer, "chat_template", None) is None:
            reason = "it has no chat template, which texts require; set tokenizer.chat_template"
            raise InvalidInput(name="the tokenizer", reason=reason)
        user = {"role": "user", "content": _MESSAGE}
        before, between = _around(tokenizer, [user], answer=True)
        _, after = _around(tokenizer, [user, {"role": "assistant", "content": _MESSAGE}])
        opening, closing, last = (_ids(tokenizer, text) for text in (before, between, after))
        special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", {}))
        ends = [ids[0] for ids in (closing, last) if ids and ids[0] in special]
        stop = None
        if not (closing and closing[0] in special):
            stop = next(iter(between.split()), None)
            if stop is None:
                reason = "it does not end a user turn with a special token or text; use another template"
                raise InvalidInput(name="the chat template of the tokenizer", reason=reason)
        return cls(tokenizer, tuple(opening), tuple(closing), tuple(dict.fromkeys([*ends, *eos])), stop)

    @property
    def overhead(self) -> int:
        """Number of tokens of a text outside of user turn and answer."""
        return len(self.opening) + len(self.closing)

    def encode(self, text: str) -> list[int]:
        """Ids of a part of a user turn."""
        return _ids(self.tokenizer, text)

    def prompt(self, user: str) -> list[int]:
        """Ids of a user turn in the template, up to the beginning of the answer."""
        messages = [{"role": "user", "content": user}]
        found: Any = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        ids: list[int] = found["input_ids"]
        return ids

    def user_turn(self, ids: Sequence[int], answer_start: int) -> str:
        """User turn of a text whose answer begins at ``answer_start``."""
        inner = ids[len(self.opening) : answer_start - len(self.closing)]
        return str(self.tokenizer.decode(list(inner), skip_special_tokens=True))

    def drawn_turn(self, ids: Sequence[int]) -> str:
        """User turn that the target wrote after :attr:`opening`, without its end."""
        text = str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
        return (text if self.stop is None else text.split(self.stop)[0]).strip()


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _around(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], *, answer: bool = False
) -> tuple[str, str]:
    """Text before and after the last message, which is :data:`_MESSAGE`."""
    text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=answer, tokenize=False))
    before, found, after = text.rpartition(_MESSAGE)
    if not found:
        reason = "it changes the text of a message; use another template"
        raise InvalidInput(name="the chat template of the tokenizer", reason=reason)
    return before, after
