"""Token ids of the turns of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from speccompile.bench.prompt_files import BenchPrompt
from speccompile.errors import InvalidOption
from speccompile.utils.mistral_common import writes_chats

#: Separator between an answer and the next turn, for a tokenizer without a chat template.
_BETWEEN = "\n\n"


def turn_ids(
    tokenizer: PreTrainedTokenizerBase,
    prompt: BenchPrompt,
    answers: Sequence[Sequence[int]] = (),
    *,
    chat: bool | None = None,
) -> list[int]:
    """Token ids of the turn after ``answers``, with the whole conversation before it.

    Args:
        answers: token ids of the model's answers to the turns before.
        chat: True applies the chat template, False does not; None leaves the choice to the prompt, then to the
            tokenizer.

    Raises:
        InvalidOption: ``chat`` is True, and the tokenizer has no template.
    """
    templated = writes_chats(tokenizer)
    if chat and not templated:
        reason = "the tokenizer has no chat template; use --no-chat"
        raise InvalidOption(where="the command line", name="--chat", value=True, reason=reason)
    wanted = prompt.chat if chat is None else chat
    turns = prompt.turns[: len(answers) + 1]
    if not templated or wanted is False:
        first = f"{prompt.system}{_BETWEEN}{turns[0]}" if prompt.system else turns[0]
        ids: list[int] = list(tokenizer(first)["input_ids"])
        for turn, answer in zip(turns[1:], answers, strict=True):
            ids += [*answer, *tokenizer(_BETWEEN + turn, add_special_tokens=False)["input_ids"]]
        return ids
    messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
    for index, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        if index < len(answers):
            text = tokenizer.decode(list(answers[index]), skip_special_tokens=True)
            messages.append({"role": "assistant", "content": str(text)})
    encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def longest_sequence(
    tokenizer: PreTrainedTokenizerBase, prompt: BenchPrompt, new_tokens: int, chat: bool | None
) -> int:
    """Most tokens of a conversation whose answers have ``new_tokens`` each."""
    turns = len(prompt.turns)
    return len(turn_ids(tokenizer, prompt, [[]] * (turns - 1), chat=chat)) + turns * new_tokens
