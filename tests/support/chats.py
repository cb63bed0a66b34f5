"""A tiny chat model, its tokenizer, and a stand-in for it whose turns are drawn without a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from support.tiny import tiny_llama

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>")
LETTERS = "abcdefghijklmnopqrstuvwxyz,.!?"
VOCAB = len(SPECIAL) + len(LETTERS)
END = 0


def chat_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Each word is a letter; what it does not know is a question mark. A space between words is not a token."""
    vocab = {word: index for index, word in enumerate([*SPECIAL, *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    made.chat_template = template
    return made


def chat_model(seed: int = 0) -> LlamaForCausalLM:
    """Random: a turn ends after about 30 tokens."""
    return tiny_llama(seed, layers=1, hidden=32, vocab=VOCAB, initializer_range=0.05)


#: ``(prompt, seed)`` to the new tokens; None as seed is greedy.
Write = Callable[[Sequence[int], int | None], list[int]]


def short_turns(prompt: Sequence[int], seed: int | None) -> list[int]:
    """3 to 12 letters and the end, which depend on the prompt and the seed alone."""
    draw = random.Random(f"{list(prompt)} {seed}")
    return [draw.randrange(len(SPECIAL), len(SPECIAL) + 26) for _ in range(draw.randint(3, 12))] + [END]


class ScriptedTarget:
    """As much of a speculator as ``make_texts`` uses. Requests end in any order."""

    def __init__(
        self, write: Write = short_turns, *, slots: int = 4, max_len: int = 64, order: int = 0, vocab: int = VOCAB
    ) -> None:
        self.write = write
        self.target_id = "Scripted"
        self.generation_config = SimpleNamespace(eos_token_id=None)
        layout = SimpleNamespace(max_batch=slots, max_len=max_len, vocab_size=vocab)
        self.arena = SimpleNamespace(layout=layout)
        self.options = SimpleNamespace(max_waiting=1024)
        self.engine = self
        self.requests: list[ScriptedRequest] = []
        self.steps = 0
        self._order = random.Random(order)

    def submit(
        self, ids: Sequence[int], *, max_new_tokens: int, seed: int | None = None, **options: Any
    ) -> ScriptedRequest:
        tokens = self.write(ids, seed)[:max_new_tokens]
        self.requests.append(ScriptedRequest(list(ids), tokens, "eos" if tokens[-1] == END else "max_new_tokens"))
        return self.requests[-1]

    def step(self) -> None:
        self.steps += 1
        running = [request for request in self.requests if not request.finished]
        self._order.choice(running[: self.arena.layout.max_batch]).finished = True


class ScriptedRequest:
    def __init__(self, prompt: list[int], tokens: list[int], reason: str) -> None:
        self.prompt, self.finished, self.cancelled = prompt, False, False
        self._result = SimpleNamespace(token_ids=tokens, finish_reason=reason)

    def result(self) -> SimpleNamespace:
        assert self.finished
        return self._result

    def cancel(self) -> None:
        self.cancelled = True
