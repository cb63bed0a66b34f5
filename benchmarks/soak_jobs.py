"""What a soak submits: requests of every kind, with all that may come of them known beforehand."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from speccompile.errors import QueueFull, RequestFailed, UndecidedLogits
from speccompile.runtime.engine import Engine
from speccompile.runtime.request import Request

VOCAB = 256
# Its embedding is NaN, and no text but a prompt that was given it ever holds it.
POISON = VOCAB - 1
# Below that, two tokens are nearly tied, and other ways to add up may choose the other one.
TIE = 1e-4
RETRY_SECONDS = 0.02
READERS = ("stream", "result", "async for")
# Of 100 requests.
CANCELLED, BROKEN = 33, 5


def random_model(seed: int) -> LlamaForCausalLM:
    """A Llama with random weights whose steps take a while."""
    config = LlamaConfig(
        num_hidden_layers=6,
        hidden_size=384,
        intermediate_size=1024,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=2048,
        # At the usual 0.02 the layers add next to nothing, and greedy text repeats one token.
        initializer_range=0.06,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def poison(model: LlamaForCausalLM) -> None:
    """From here on a prompt with ``POISON`` has no text, and none of the others changes."""
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = float("nan")
        model.lm_head.weight[POISON] = 0.0


def greedy(model: LlamaForCausalLM, prompt: list[int], most: int) -> list[int]:
    """transformers' text, up to where two tokens are nearly tied."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=most,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(out.logits).topk(2).values
    tied = (best[:, 0] - best[:, 1] < TIE).nonzero()
    sure = int(tied[0]) if len(tied) else most
    tokens: list[int] = out.sequences[0, len(prompt) : len(prompt) + sure].tolist()
    return tokens


class Deliberate(Exception):
    """What broken callbacks raise."""


@dataclass
class Job:
    """A request to be, and what became of it.

    Args:
        text: its text if nothing stops it; ``most`` is its ``max_new_tokens``.
        kind: plain, cancelled, or what is broken: streamer or criterion (which raise at token ``fault_at``), NaN.
        at: seconds from the start on.
    """

    prompt: list[int]
    text: list[int]
    most: int
    eos: list[int]
    kind: str
    reader: str
    at: float = 0.0
    cancel_after: float = 0.0
    fault_at: int = 0
    request: Request | None = None
    heard: list[int] = field(default_factory=list)
    heard_ends: int = 0
    read: list[int] = field(default_factory=list)
    read_ends: int = 0
    read_reason: str = ""
    failure: BaseException | None = None
    retries: int = 0
    _shown: bool = False

    # --- its streamer and its stopping criterion -----------------------------------------------------

    def put(self, value: torch.Tensor) -> None:
        if not self._shown:
            self._shown = True
            return
        self.heard += value.tolist()
        if self.kind == "streamer" and len(self.heard) == self.fault_at:
            raise Deliberate

    def end(self) -> None:
        self.heard_ends += 1

    def criterion(self, ids: torch.Tensor, scores: Any) -> torch.Tensor:
        if ids.shape[1] - len(self.prompt) == self.fault_at:
            raise Deliberate
        return torch.tensor([False])

    # --- its owner -----------------------------------------------------------------------------------

    def submit(self, engine: Engine) -> None:
        while self.request is None:
            try:
                self.request = engine.submit(
                    self.prompt,
                    max_new_tokens=self.most,
                    eos_token_id=self.eos,
                    streamer=self,
                    stopping_criteria=self.criterion if self.kind == "criterion" else None,
                )
            except QueueFull:
                self.retries += 1
                time.sleep(RETRY_SECONDS)

    def consume(self) -> None:
        """Read it to its end."""
        assert self.request is not None
        try:
            if self.reader == "stream":
                self.read.extend(self.request.stream())
            elif self.reader == "result":
                self.read = self.request.result().token_ids
            else:
                asyncio.run(self._consume_async(self.request))
        except BaseException as failure:
            self.failure = failure
        self.read_ends += 1
        self.read_reason = self.request.finish_reason

    async def _consume_async(self, request: Request) -> None:
        async for token in request:
            self.read.append(token)

    # --- what has to be true -------------------------------------------------------------------------

    def problems(self) -> dict[str, str]:
        """What is wrong with it, by the name of the check."""
        if self.request is None or not self.request.finished:
            return {"ended": f"{self.request} has not ended"}
        got, reason = self.request.new_tokens, self.request.finish_reason
        found = {}
        expected = self._expected()
        if reason not in expected:
            found["reason"] = f"{self.kind}: {self.request} ended by {reason} ({self.request.error!r})"
        elif got != expected[reason]:
            found["text"] = f"{self.kind}, {reason}: {got} is not {expected[reason]}"
        raised = self.kind == "streamer" and reason == "error"
        if (self.read_ends, self.heard_ends) != (1, 0 if raised else 1) or self.read_reason != reason:
            found["ended"] = f"{self.request}: read to {self.read_ends} ends, heard {self.heard_ends}"
        cause = None if self.failure is None else self.failure.__cause__
        own = isinstance(cause, UndecidedLogits if self.kind == "NaN" else Deliberate)
        if not (isinstance(self.failure, RequestFailed) and own if reason == "error" else self.failure is None):
            found["reason"] = f"{self.kind}, {reason}: its reader received {self.failure!r}, because of {cause!r}"
        whole = self.reader == "result" and reason == "error"
        if self.heard != got or (self.read != got and not whole):
            found["doubled"] = f"{self.request}: heard {self.heard}, read {self.read}, has {got}"
        return found

    def _expected(self) -> dict[str, list[int]]:
        """Its text by the reasons that may have ended it."""
        assert self.request is not None
        if self.kind == "NaN":
            return {"error": []}
        if self.kind in ("streamer", "criterion"):
            return {"error": self.text[: self.fault_at]}
        whole = {"eos" if self.text[-1] in self.eos else "max_new_tokens": self.text}
        return whole | ({"cancelled": self.text[: len(self.request.new_tokens)]} if self.kind == "cancelled" else {})


def make_jobs(model: LlamaForCausalLM, count: int, seconds: float, mean_tokens: int, seed: int) -> list[Job]:
    """Jobs at random moments of the first ``seconds``. Their prompts begin alike, or like each other's texts."""
    rng = random.Random(seed)

    def tokens(length: int) -> list[int]:
        return [rng.randrange(POISON) for _ in range(length)]

    shared = tokens(24)
    bases = [shared + tokens(8), shared + tokens(3), shared[:10] + tokens(20), tokens(5)]
    known = [(base, greedy(model, base, 2 * mean_tokens)) for base in bases]
    known = [(base, text) for base, text in known if len(text) > 2]
    moments = sorted(rng.uniform(0, seconds) for _ in range(count))
    jobs = [_job(rng, known, mean_tokens) for _ in moments]
    kinds = ["plain"] * count
    chosen = rng.sample(range(count), count * (CANCELLED + BROKEN) // 100)
    for place, index in enumerate(chosen):
        broken = place < max(3, count * BROKEN // 100)
        kinds[index] = ("streamer", "criterion", "NaN")[place % 3] if broken else "cancelled"
    for job, kind, at in zip(jobs, kinds, moments, strict=True):
        job.kind, job.at = kind, at
        job.cancel_after, job.fault_at = rng.random(), rng.randint(1, len(job.text))
        if kind == "NaN":
            job.prompt[rng.randrange(len(job.prompt))] = POISON
    return jobs


def _job(rng: random.Random, known: list[tuple[list[int], list[int]]], mean_tokens: int) -> Job:
    base, whole = rng.choice(known)
    said = rng.choice((0, 0, rng.randrange(len(whole) // 2)))
    most = rng.randint(mean_tokens // 2, mean_tokens * 3 // 2)
    text = whole[said : said + most]
    # Of a text that was cut at a tie, no more may be asked for.
    most, eos = len(text), [rng.choice(text)] if rng.random() < 0.2 else []
    if eos:
        text = text[: text.index(eos[0]) + 1]
    return Job(base + whole[:said], text, most, eos, "plain", rng.choice(READERS))
