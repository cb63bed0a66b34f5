"""Prompts that quote, calculate or ask for code, for ``speccompile make-texts --prompts``.

A model that draws its own user turns seldom asks about a long passage. Here passages are answers that it wrote before:

    python examples/prompts_from_texts.py TEXTS prompts.jsonl --model smollm2 --count 2000
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated

import typer

from speccompile.cli.models import load
from speccompile.training import read_texts

#: Words of a passage.
SHORTEST, LONGEST = 30, 160

ABOUT_PASSAGES = (
    "Summarize the following text in one or two sentences:\n\n{passage}",
    "Extract all names, places and numbers from this text:\n\n{passage}",
    "Rewrite the following text in simpler words:\n\n{passage}",
    "Correct the mistakes in this text and write out the whole text:\n\n{passage}",
    "What is the main idea of this passage?\n\n{passage}",
    "Read this text, then list its most important facts.\n\n{passage}",
    "Translate the following text into {language}:\n\n{passage}",
    "{passage}\n\nIs the text above an explanation, a story or an opinion? Quote the sentences that show it.",
)
LANGUAGES = ("French", "German", "Spanish", "English")

FOR_CODE = (
    "Write a {programming} function that {task}.",
    "Write a {programming} program that {task}, and explain each step.",
    "How do I write {programming} code that {task}?",
    "Fix this task description and solve it in {programming}: code which {task}.",
)
PROGRAMMING = ("Python", "Python", "Python", "JavaScript", "Java", "C++", "C")
TASKS = (
    "sorts a list of {things}",
    "counts the {things} in a file",
    "finds the largest of {n} numbers",
    "reverses the order of {things}",
    "removes duplicate {things} from a list",
    "computes the average of {n} values",
    "checks whether a string is the name of one of the {things}",
    "reads {things} from a CSV file and prints every {n}th row",
    "merges two sorted lists of {things}",
    "prints the first {n} square numbers",
    "groups {things} by their first letter",
    "draws {n} random {things} without repeating any",
    "converts a list of {things} to a dictionary with their lengths",
    "finds all {things} that begin with a vowel",
    "prints a table of {n} rows and two columns",
    "asks the user for {n} {things} and prints them in upper case",
    "checks whether a number is a multiple of {n}",
    "computes the factorial of {n} without recursion",
    "searches a sorted list of {things} by halving it",
    "splits a text into sentences and prints every {n}th",
    "writes {things} to a file, one in each line",
    "returns the {n} most frequent {things} in a text",
    "defines a class for {things} with methods to add and remove one",
    "measures how long it takes to sort {n} thousand {things}",
)
THINGS = ("words", "names", "orders", "cities", "books", "users", "prices", "dates", "files", "scores")

CALCULATIONS = (
    "{name} buys {a} {goods} for ${b} each and pays with a ${c} note. How much change is there?",
    "A box holds {a} {goods}. How many boxes does {name} need for {c} {goods}?",
    "{name} reads {a} pages a day. How many days does a book of {c} pages take?",
    "{name} has {c} {goods}, gives away {a} of them and loses {b}. How many are left?",
    "A car drives {a} miles in one hour. How far does it drive in {b} hours?",
    "What is {a} percent of {c}? Show how you calculate it.",
)
NAMES = ("Anna", "Ben", "Carla", "David", "Elif", "Farid", "Grace", "Hugo")
GOODS = ("apples", "pencils", "tickets", "marbles", "cups", "stamps")


def prompt(rng: random.Random, passages: list[str]) -> str:
    """One prompt: half of them are about a passage."""
    if rng.random() < 0.5:
        return rng.choice(ABOUT_PASSAGES).format(passage=rng.choice(passages), language=rng.choice(LANGUAGES))
    if rng.random() < 0.5:
        task = rng.choice(TASKS).format(things=rng.choice(THINGS), n=rng.randrange(2, 30))
        return rng.choice(FOR_CODE).format(programming=rng.choice(PROGRAMMING), task=task)
    a, b = rng.randrange(2, 40), rng.randrange(2, 12)
    numbers = {"a": a, "b": b, "c": a * b + rng.randrange(1, 20)}
    return rng.choice(CALCULATIONS).format(name=rng.choice(NAMES), goods=rng.choice(GOODS), **numbers)


def main(
    texts: Annotated[Path, typer.Argument(help="A folder of make-texts.")],
    output: Annotated[Path, typer.Argument(help="A .jsonl file for make-texts --prompts.")],
    model: Annotated[str, typer.Option(help="That wrote the texts.")] = "smollm2",
    count: Annotated[int, typer.Option(min=1)] = 2000,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Write prompts over the answers of TEXTS."""
    if output.suffix != ".jsonl":
        # make-texts would take each line of another file for a prompt as it is.
        raise typer.BadParameter("its name must end in .jsonl", param_hint="OUTPUT")
    _, tokenizer = load(model)
    answers = [
        tokenizer.decode(text.input_ids[text.answer_start :], skip_special_tokens=True) for text in read_texts(texts)
    ]
    words = [answer.split() for answer in answers]
    passages = [" ".join(found[:LONGEST]) for found in words if len(found) >= SHORTEST]
    rng = random.Random(seed)
    # In the order in which they were drawn.
    found = dict.fromkeys(prompt(rng, passages) for _ in range(count))
    output.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in found))
    typer.echo(f"{len(found)} prompts, {len(passages)} passages")


if __name__ == "__main__":
    typer.run(main)
