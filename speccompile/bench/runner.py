"""Runs all lines of the table over the same prompts, turn by turn, and appends each answer to a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from zlib import crc32

from transformers import PreTrainedTokenizerBase

from speccompile.bench.answers import Decoding
from speccompile.bench.contenders import Contender
from speccompile.bench.dialogue import turn_ids
from speccompile.bench.method_names import PLAIN
from speccompile.bench.prompt_files import BenchPrompt
from speccompile.bench.results import Answered, ResultFile

_SEEDS = 2**31


@dataclass(frozen=True)
class BenchPlan:
    """Prompts of a run and how often they are answered.

    Args:
        seed: of what is drawn. The draws of a turn depend on it and on the name of the prompt only.
        chat: see :func:`~speccompile.bench.dialogue.turn_ids`.
    """

    prompts: Sequence[BenchPrompt]
    rounds: int
    decoding: Decoding
    seed: int = 0
    chat: bool | None = None

    def keys(self, line: str) -> set[tuple[str, str, int, int]]:
        """Keys of the answers of a line."""
        return {
            (line, prompt.name, turn, round)
            for prompt in self.prompts
            for turn in range(len(prompt.turns))
            for round in range(self.rounds)
        }

    def seed_of(self, prompt: BenchPrompt, turn: int) -> int:
        """The seed of a turn, which is equal on all machines."""
        return (self.seed + crc32(f"{prompt.name}/{turn}".encode())) % _SEEDS


def run_bench(
    contenders: Sequence[Contender],
    plan: BenchPlan,
    tokenizer: PreTrainedTokenizerBase,
    file: ResultFile,
    machine: str,
    after_answer: Callable[[], None] = lambda: None,
) -> None:
    """Answer each turn with all contenders before the next turn, after a warm-up of each. Answers in the file are not
    repeated.

    A turn after the first continues the answer of K=0, for all lines: they have equal contexts, also under a rule that
    changes the text.

    Args:
        contenders: lines of the table. If K=0 is missing, its answers are in the file.
        after_answer: called after each answer.
    """
    done = file.results.done(machine)
    plain = {
        (answered.prompt, answered.turn): answered.answer.token_ids
        for answered in file.results.answers.get(machine, ())
        if answered.line == PLAIN
    }
    # Buffers that depend on the size of the input are then large enough.
    longest = max((turn_ids(tokenizer, prompt, chat=plan.chat) for prompt in plan.prompts), key=len)
    for contender in contenders:
        contender.warm_up(longest, plan.decoding)
    for round in range(plan.rounds):
        for number, prompt in enumerate(plan.prompts):
            # The first line finds other caches than the later ones, so the order rotates.
            first = (number + round) % max(1, len(contenders))
            for turn in range(len(prompt.turns)):
                answers = [plain[prompt.name, before] for before in range(turn)]
                ids = turn_ids(tokenizer, prompt, answers, chat=plan.chat)
                for contender in [*contenders[first:], *contenders[:first]]:
                    if (contender.name, prompt.name, turn, round) in done:
                        continue
                    answer = contender.answer(ids, plan.decoding, plan.seed_of(prompt, turn))
                    answered = Answered(contender.name, prompt.name, prompt.category, turn, round, len(ids), answer)
                    file.add(answered)
                    if contender.name == PLAIN:
                        plain.setdefault((prompt.name, turn), answer.token_ids)
                    after_answer()
