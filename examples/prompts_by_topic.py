"""Prompts for ordinary tasks, for ``speccompile make-texts --prompts``: questions, explanations, letters, stories,
roles, reasoning and code, each about one of many topics.

A small model that draws its own user turns repeats few kinds of tasks. These combine templates with topics:

    python examples/prompts_by_topic.py prompts.jsonl --count 4000
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from string import Formatter
from typing import Annotated

import typer

TEMPLATES = {
    "questions": (
        "What is {science}?",
        "What is the capital of {country}, and what is it known for?",
        "Where is {country} located and which languages are spoken there?",
        "When did {event} begin?",
        "Why did {event} happen?",
        "Who discovered {science}?",
        "Who was the leader of {country} during {event}?",
        "Which {animal} is the largest, and where does it live?",
        "How long does a {animal} live?",
        "How many people live in {country}?",
        "What do you need to become a {job}?",
        "What is the difference between a {job} and a {other_job}?",
        "What does a {job} do every day?",
    ),
    "writing": (
        "Write a short story about a {job} who finds a {object} in {country}.",
        "Write a poem about {theme}.",
        "Write an email to a {job} that asks for advice about {hobby}.",
        "Write a letter of complaint about a broken {object}.",
        "Write the introduction of an article about {theme} and {hobby}.",
        "Draft a speech of a {job} on {theme}.",
        "Write a product description for a {object} that is made for a {job}.",
        "Write a dialogue between a {job} and a {animal}.",
        "Describe a morning in {country} in two vivid paragraphs.",
        "Write a review of a book about {event}.",
        "Suggest five titles for a podcast about {hobby}.",
        "Write an invitation to a club for {hobby}.",
    ),
    "roles": (
        "You are a {job}. Explain to a child why {theme} matters.",
        "Act as a {job} and answer: how do I begin with {hobby}?",
        "Speak like a pirate and explain {science} to me.",
        "Pretend that you are a {animal}. Describe your day.",
        "You are a travel guide in {country}. Welcome a group of visitors.",
        "Play the part of a strict teacher who explains {science}.",
        "You are a grandmother who remembers {event}. What do you tell your family?",
        "Answer as a robot that has just learned about {theme}.",
    ),
    "reasoning": (
        "{name} is taller than {other_name}, and {other_name} is taller than Sam. Who is the shortest? Explain.",
        "All members of a club like {hobby}. {name} does not like {hobby}. Is {name} a member? Explain your answer.",
        "{name} has a {object} but does not use it. What could be the reasons?",
        "A {animal}, a {object} and a book stand in a row. The book is on the left. What may stand in the middle?",
        "Which word does not belong: {animal}, {other_animal}, {object}? Explain.",
        "If it rains, {name} stays at home. {name} is not at home. What follows?",
        "{name} left home at {a} o'clock and walked for {b} hours. Is it day or night when the walk ends?",
        "What happens if everybody in {country} becomes a {job}? Think step by step.",
    ),
    "calculations": (
        "{name} earns ${a} an hour and works {b} hours a day. How much does {name} earn in five days?",
        "{name} buys {b} of {goods} at ${a} each and has a coupon for ${b}. What is the total cost?",
        "There are {c} {goods} in {b} bags of the same size. {name} takes {b} out of one bag. How many stay in it?",
        "{name} is {b} years older than {other_name}, who is {a} years old. How old are they together?",
        "A tank holds {c} liters. It loses {b} liters an hour. How much is left after {b} hours?",
        "Half of the {c} {goods} are red and {b} of the red ones are sold. How many red ones are left?",
        "{name} runs {a} kilometers on Monday and twice as far on Tuesday. How far is that altogether?",
        "A ticket costs ${a}. Children pay half. What do {b} adults and {b} children pay?",
        "Solve for x: {b}x + {a} = {c}.",
        "What is the area of a rectangle with sides of {a} and {b} meters? And its perimeter?",
        "What is the probability of rolling a number above {small} with a die?",
        "Find the next two numbers: {b}, {a}, {c}.",
    ),
    "code": (
        "Write a Python function that takes a list of {goods} and returns {result}.",
        "Write a Python class for a {object} with two methods and an example.",
        "Write an HTML page about {hobby} with a heading, a list and a button.",
        "Write a SQL query that returns {result} from a table of {goods}.",
        "Explain what a {structure} is and implement it in Python.",
        "Write a JavaScript function that checks whether a {structure} is empty.",
        "Write a C++ program that reads {goods} and prints {result}.",
        "Write a Python script that reads a file of {goods} and prints {result}.",
        "What is the time complexity of searching in a {structure}? Show an example in code.",
        "Write a regular expression that finds {pattern}, and explain it.",
        "Find the mistake: for i in range(len(x)): print(x[i + 1])",
        "Write unit tests for a function that returns {result}.",
    ),
    "explanations": (
        "Explain {science} in simple words.",
        "Explain how {science} and {other_science} are related.",
        "What are the main stages of {science}?",
        "Describe the causes and the effects of {event}.",
        "Discuss the advantages and disadvantages of {theme}.",
        "How does {theme} influence the economy of {country}?",
        "Compare {country} and {other_country} in terms of culture and economy.",
        "What can we learn from {event} for today?",
        "Give an overview of the history of {hobby}.",
        "How would you teach {science} to students? Make a plan for one week.",
        "Which problems does a {job} solve with {science}?",
        "List five facts about {science}.",
        "Give me tips for {hobby}.",
        "How do I keep a {animal} healthy?",
    ),
}

WORDS = {
    "science": (
        "gravity, evolution, electricity, magnetism, the water cycle, plate tectonics, natural selection, DNA, "
        "osmosis, a chemical bond, radioactivity, the greenhouse effect, the immune system, cell division, entropy, "
        "sound, a black hole, an ecosystem, the nitrogen cycle, a neural network, an algorithm, statistics, primes, "
        "supply and demand, inflation, a vaccine, digestion, the periodic table, friction, kinetic energy, "
        "machine learning, a logarithm, the speed of light, an enzyme, memory, sleep, climate, a volcano"
    ),
    "country": (
        "France, Japan, Brazil, Egypt, India, Canada, Kenya, Mexico, Norway, Greece, Peru, China, Italy, Turkey, "
        "Spain, Australia, Germany, Vietnam, Morocco, Argentina, Poland, South Korea, Nigeria, Sweden, Thailand"
    ),
    "event": (
        "the French Revolution, World War I, the Industrial Revolution, the Renaissance, the Cold War, "
        "the American Civil War, the Great Depression, the fall of Rome, the moon landing, the Black Death, "
        "the Space Race, the Russian Revolution, the invention of printing, the fall of the Berlin Wall, "
        "the Gold Rush, the Crusades, the first Olympic Games, the building of the pyramids"
    ),
    "animal": (
        "cat, dog, horse, elephant, penguin, whale, owl, snake, tiger, rabbit, dolphin, wolf, turtle, bee, spider, fox"
    ),
    "job": (
        "doctor, teacher, farmer, pilot, nurse, chef, lawyer, painter, carpenter, engineer, journalist, firefighter, "
        "librarian, scientist, baker, detective, gardener, musician, programmer, sailor, judge, plumber"
    ),
    "object": (
        "map, lamp, bicycle, camera, key, clock, phone, mirror, radio, ring, telescope, umbrella, piano, chair, kettle"
    ),
    "theme": (
        "friendship, freedom, recycling, remote work, artificial intelligence, the ocean, winter, courage, hope, "
        "public transport, renewable energy, social media, healthy food, education, money, sports, space travel, "
        "time management, democracy, tourism, globalization, electric cars, music, family, peace"
    ),
    "hobby": (
        "gardening, chess, photography, cooking, running, painting, hiking, sewing, swimming, fishing, reading, yoga, "
        "dancing, learning a language, playing the guitar, cycling, baking bread, collecting stamps, camping"
    ),
    "name": "Anna, Ben, Carla, David, Elif, Farid, Grace, Hugo, Ines, Jack, Kim, Leo, Maya, Noah, Olga, Paul, Rita",
    "goods": "apples, pencils, tickets, marbles, cups, stamps, books, cookies, shirts, eggs, roses, coins, names",
    "result": (
        "the largest one, the three most frequent ones, all without duplicates, them in reverse order, the average "
        "length, the number of each, the second smallest, those that begin with a vowel, them sorted by length"
    ),
    "structure": "stack, queue, linked list, binary tree, hash table, heap, graph, set, dictionary, array",
    "pattern": "phone numbers, dates, email addresses, words with a double letter, prices, file names, years",
}
VALUES = {name: tuple(word.strip() for word in text.split(",")) for name, text in WORDS.items()}


def prompt(rng: random.Random) -> str:
    """One prompt: a kind of task, one of its templates, and words for the places in it."""
    template = rng.choice(TEMPLATES[rng.choice(tuple(TEMPLATES))])
    a, b = rng.randrange(2, 40), rng.randrange(2, 12)
    words = {"a": str(a), "b": str(b), "c": str(a * b), "small": str(rng.randrange(1, 6))}
    for _, place, _, _ in Formatter().parse(template):
        if place is not None and place not in words:
            others = set(words.values())
            words[place] = rng.choice([word for word in VALUES[place.removeprefix("other_")] if word not in others])
    return template.format(**words)


def main(
    output: Annotated[Path, typer.Argument(help="A .jsonl file for make-texts --prompts.")],
    count: Annotated[int, typer.Option(min=1)] = 4000,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Write different prompts, COUNT at most."""
    if output.suffix != ".jsonl":
        # make-texts would take each line of another file for a prompt as it is.
        raise typer.BadParameter("its name must end in .jsonl", param_hint="OUTPUT")
    rng = random.Random(seed)
    found = dict.fromkeys(prompt(rng) for _ in range(count))
    output.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in found))
    typer.echo(f"{len(found)} prompts")


if __name__ == "__main__":
    typer.run(main)
