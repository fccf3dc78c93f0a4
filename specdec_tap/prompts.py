# ruff: noqa: E501 - the sentences of prompts are easier to read unbroken
"""Chat prompts to train a small drafter on, made from word lists and templates.

A drafter learns from what users send, and real traffic is the best source. Where there is none yet (the demo,
tests, benchmarks) this generator stands in: questions, writing, roleplay, code, arithmetic, reasoning,
extraction and rewriting of made-up passages, about one in five with follow-up turns. Everything in it was
written for this project; nothing is copied from a data set. The same seed gives the same prompts on every machine.

Run alone it writes a file that ``specdec-tap replay`` reads::

    python -m specdec_tap.prompts --count 600 --seed 0 --out prompts.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from .errors import ConfigError, InputError

# Share of each family, in parts; the first group is made by functions below, the second from templates.yaml.
WEIGHTS = {
    "arithmetic": 10,
    "reasoning": 6,
    "passage": 12,
    "rewrite": 7,
    "classify": 4,
    "data": 4,
    "explain": 11,
    "compare": 5,
    "list": 8,
    "plan": 6,
    "write": 13,
    "roleplay": 5,
    "opinion": 5,
    "history": 5,
    "code": 11,
    "meta": 6,
    "advice": 6,
}
FOLLOW_UP_SHARE = 0.2
CASUAL_SHARE = 0.15
MAX_TRIES_PER_PROMPT = 200
_SLOT = re.compile(r"\{([a-z_]+)(\d*)(?::(\d+)-(\d+))?\}")
_ARTICLE = re.compile(r"\b([Aa]) (?=(?!one\b|euro)[aeio])", re.IGNORECASE)
_ANY = ("science", "computing", "society", "history", "health", "arts", "nature")


@cache
def _load(name: str) -> dict[str, list[str]]:
    import yaml

    return yaml.safe_load((resources.files("specdec_tap") / "data" / name).read_text("utf-8"))


class _Words:
    """Fills the slots of one prompt: the same slot gets the same word, different slots different ones."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._filled: dict[str, str] = {}

    def fill(self, template: str) -> str:
        text = _SLOT.sub(self._slot, template)
        # Templates say "a {animal}"; no word of the lists starts with a sounded u but "an umbrella".
        return _ARTICLE.sub(r"\1n ", text)

    def word(self, slot: str) -> str:
        return self.fill("{" + slot + "}")

    def number(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def _slot(self, match: re.Match[str]) -> str:
        name, digit, low, high = match.groups()
        key = name + digit
        if key in self._filled:
            return self._filled[key]
        if low is not None:
            value = str(self.rng.randint(int(low), int(high)))
        else:
            words = _load("words.yaml")[self.rng.choice(_ANY) if name == "any" else name]
            taken = set(self._filled.values())
            value = self.rng.choice([word for word in words if word not in taken])
        self._filled[key] = value
        return value


# --- families made by functions ------------------------------------------------------------------------------


def _arithmetic(w: _Words) -> str:
    """Return a word problem whose numbers work out, or a bare calculation."""
    a, b, c = w.number(2, 12), w.number(3, 40), w.number(2, 9)
    price, percent = w.number(2, 80), w.rng.choice([5, 10, 15, 20, 25, 30, 40, 50])
    forms = [
        f"{w.word('name')} buys {a} notebooks for {price} euros each and pays with a {100 * (a * price // 100 + 1)} "
        "euro note. How much change is there?",
        f"A train leaves at {w.number(6, 11)}:{w.number(10, 50)} and arrives {b * c} minutes later. When does it "
        "arrive?",
        f"A shop sells {w.word('product')} for {price * 4} euros and takes {percent} percent off. What is the new "
        "price? Show your work.",
        f"{w.word('name')} reads {b} pages a day. How many days does a book of {b * a} pages take?",
        f"What is {w.number(11, 99)} times {w.number(11, 99)}? Explain how to do it in your head.",
        f"There are {a * c} children and {a} tables. How many children sit at each table if all tables are equally "
        f"full, and how many if {w.number(1, a)} more children come and share the same tables?",
        f"A recipe for {w.word('food')} needs {b * 10} grams of flour for {a} people. How much is needed for "
        f"{a * c} people?",
        f"{w.word('name')} is {b} years old and {w.word('name2')} is {c} years older. How old will they be together "
        f"in {a} years?",
        f"A car uses {w.number(4, 9)} litres for 100 kilometres. How many litres does it need for {b * 20} "
        "kilometres?",
        f"A rectangle is {b} metres long and {a} metres wide. What are its area and its perimeter?",
        f"Of {a * 10} people in a survey, {percent} percent own a bicycle. How many do not?",
        f"{w.word('name')} saves {price} euros every month. How long until there are {price * c * 3} euros?",
        f"Two trains that are {b * c} kilometres apart drive towards each other at {b} and {b * (c - 1)} kilometres "
        "per hour. When do they meet?",
        f"Solve for x: {a}x + {b} = {a * c + b}.",
        f"What is {percent} percent of {price * 10}?",
        f"If {a} machines make {a * c} parts in an hour, how many parts do {a + c} machines make in {c} hours?",
        f"Convert {b} kilometres to metres and {a} hours to seconds.",
        f"A bag holds {a} red, {c} blue and {b} green balls. What is the chance of drawing a red one?",
        f"The numbers {b}, {b + c}, {b + 2 * c} and {b + 3 * c} form a pattern. What are the next two numbers?",
        f"Simplify the fraction {a * c}/{a * b}.",
        f"{w.word('name')} runs {a} kilometres in {b + 20} minutes. What is the pace in minutes per kilometre?",
        f"What is the average of {a}, {b}, {c} and {price}?",
    ]
    return w.rng.choice(forms)


def _reasoning(w: _Words) -> str:
    names = [w.word(f"name{i}") for i in ("", "2", "3", "4")]
    order = w.rng.sample(names, 4)
    relation = w.rng.choice(["taller", "older", "faster", "richer", "louder"])
    days = _load("words.yaml")["weekday"]
    day, shift = w.rng.choice(days), w.number(3, 40)
    clues = [f"{x} is {relation} than {y}." for x, y in pairwise(order)]
    w.rng.shuffle(clues)
    forms = [
        f"{' '.join(clues)} Who is the least {relation.replace('ier', 'y').removesuffix('er')} of them? Explain.",
        f"Today is {day}. Which day of the week is it in {shift} days?",
        f"All {w.word('animal')}s in {w.word('place')} are {w.word('adjective')}. {names[0]}'s pet is a "
        f"{w.word('animal')} from there. What do we know about it?",
        f"{names[0]} sits to the left of {names[1]}. {names[2]} sits to the right of {names[1]}. Who sits in the "
        "middle?",
        w.fill("If it rains, {name} stays at home. {name} is in {place}. Is it raining? Explain your reasoning."),
        w.fill("A {profession} has {n:3-9} {animal}s and gives away all but {n2:1-2}. How many are left?"),
        w.fill("{name} puts {object} into a box and leaves. {name2} moves it to a drawer. Where will {name} look?"),
        w.fill("What would happen if there were no {nature} any more? Think it through step by step."),
        w.fill("Which is heavier, {n:1-9} kilograms of feathers or {n2:1-9} kilograms of iron? Explain."),
        w.fill("{name} is the parent of {name2}, and {name2} is the parent of {name3}. How is {name3} related to "
               "{name}?"),
        w.fill("You have {object}, {object2} and a rope, and you are locked in {place}. How could you get out?"),
        w.fill("Find the mistake: all {animal}s can swim, a {animal2} can swim, so a {animal2} is a {animal}."),
    ]  # fmt: skip
    return w.rng.choice(forms)


def _passage_text(w: _Words) -> str:
    """Return a made-up passage of two to five sentences that hangs together."""
    year = w.number(1962, 2023)
    count, share, money = w.number(12, 900), w.number(3, 85), w.number(2, 95)
    news = [
        f"{w.word('company')} announced on {w.word('weekday')} that it will open an office in {w.word('city')} in "
        f"{w.word('month')} and hire {count} people.",
        f"The firm was founded in {year} by {w.word('name')}, a former {w.word('profession')}.",
        f"Its best-known product is {w.word('product')}, which brings in {share} percent of its sales.",
        f"Last year it earned {money} million euros, {w.number(2, 30)} percent more than in the year before.",
        f"{w.word('name2')}, who leads the local council, called the decision good news for the region.",
        "Some neighbours worry about traffic and rising rents.",
    ]
    report = [
        f"Researchers from {w.word('country')} followed {count} volunteers who took up {w.word('hobby')}.",
        f"After {w.number(3, 24)} months, {share} percent said that they slept better.",
        f"The effect was strongest among people over {w.number(30, 70)}.",
        f"{w.word('name')}, who led the study, warns that the sample was small.",
        "A larger trial is planned for next year.",
    ]
    visit = [
        f"{w.word('name')} arrived in {w.word('city')} on a {w.word('adjective')} {w.word('weekday')} in "
        f"{w.word('month')}.",
        f"In the bag were {w.word('object')} and {w.word('object2')}, nothing else.",
        f"The first night was spent in {w.word('place')}, where a {w.word('profession')} offered {w.word('food')}.",
        f"They talked about {w.word('any')} until {w.number(1, 4)} in the morning.",
        f"Two days later {w.word('name')} moved on to {w.word('country')}.",
    ]
    mail = [
        f"Hello {w.word('name')}, thank you for your message of {w.word('weekday')}.",
        f"We would like to order {w.number(2, 60)} pieces of {w.word('product').removeprefix('a ')} for our branch "
        f"in {w.word('city')}.",
        f"Please send them before the {w.number(2, 28)}th of {w.word('month')}, since {w.word('occasion')} is coming "
        "up.",
        f"The invoice goes to {w.word('company')}, attention {w.word('name2')}.",
        "If anything is unclear, call me in the afternoon.",
    ]
    review = [
        f"I bought {w.word('product')} from {w.word('company')} {w.number(2, 11)} months ago.",
        w.rng.choice(
            ["At first I was happy with it.", "I had my doubts from the start.", "It looked great."]
        ),
        w.rng.choice(
            [
                f"After {w.number(2, 9)} weeks it stopped working and nobody answered my e-mails.",
                "It does exactly what it should, and the price is fair.",
                "The quality is fine, but the manual is useless.",
                "My neighbour has the same one and loves it; mine arrived broken.",
            ]
        ),
        f"I would give it {w.number(1, 5)} stars out of five.",
    ]
    chosen = w.rng.choice([news, report, visit, mail, review])
    keep = w.rng.randint(3, len(chosen))
    return " ".join(chosen[:keep])


def _passage(w: _Words) -> str:
    task = w.rng.choice(
        [
            "Summarise this in one sentence.",
            "Summarise the following text for {audience}.",
            "List all names and places in this text.",
            "Extract every number from this text and say what it means.",
            "What is the tone of this text? Give a reason.",
            "Write {n:2-5} questions that this text answers, with the answers.",
            "Turn this text into bullet points.",
            "Give this text a headline and three keywords.",
            "Return the main facts as a JSON object.",
            "What is missing in this text that a reader would want to know?",
            "Who is mentioned here, and what does each of them do?",
            "Translate this into {language}.",
            "Write a short reply to this.",
            "Is this text positive, negative or neutral? Answer with one word, then explain.",
            "Continue this text with three more sentences.",
            "Explain this text in simpler words.",
        ]
    )
    text = _passage_text(w)
    return w.rng.choice(
        [f"{w.fill(task)}\n\n{text}", f'{w.fill(task)}\n\n"{text}"', f"{text}\n\n{w.fill(task)}"]
    )


def _rewrite(w: _Words) -> str:
    task = w.rng.choice(
        [
            "Rewrite this in a {adjective} tone:",
            "Make this half as long:",
            "Rewrite this as if {role} had said it:",
            "Put this into the past tense:",
            "Turn this into a poem:",
            "Rewrite this for {audience}:",
            "Correct and improve this text:",
            "Rewrite this as a dialogue:",
            "Change this to the first person:",
            "Make this sound more like a newspaper article:",
        ]
    )
    sentences = [
        "{name} has worked as a {profession} in {city} for {n:2-30} years and still likes it.",
        "our team think that {society} are a important topic and should be discuss more often",
        "We are sorry to tell you that {product} will not be delivered before {month}.",
        "The {animal} crossed {place} slowly, looked at {object}, and went on.",
        "Thank you for the invitation to {occasion}; I will bring {food}.",
        "In my opinion {hobby} is better than {hobby2}, because it costs less and one meets more people.",
        "i dont understand {computing} can you explane it to me please",
        "When I was young, everybody in {country} talked about {arts}.",
        "The meeting on {weekday} was long, {name} talked about {health}, and nothing was decided.",
        "{company} offers {product} with {n:10-50} percent off until the end of {month}.",
    ]
    chosen = w.rng.sample(sentences, w.rng.choice([1, 1, 2, 3]))
    return f"{w.fill(task)} {' '.join(w.fill(sentence) for sentence in chosen)}"


def _classify(w: _Words) -> str:
    words = _load("words.yaml")
    groups = w.rng.sample(
        ["animal", "food", "profession", "city", "emotion", "hobby", "programming", "month"], 3
    )
    items = [item for group in groups for item in w.rng.sample(words[group], w.number(2, 3))]
    w.rng.shuffle(items)
    forms = [
        f"Sort these into groups and name each group: {', '.join(items)}.",
        f"Which of these belong together, and why? {', '.join(items)}",
        f"Make a table with two columns, word and category, for: {', '.join(items)}.",
        f"Pick the odd ones out: {', '.join(items)}. Explain your choice.",
        f"Write one sentence that uses at least three of these words: {', '.join(items)}.",
        f"Order these from the shortest to the longest word: {', '.join(items)}.",
        f"Label each message as question, complaint or praise:\n1. {w.fill('Where is my order of {product}?')}\n"
        f"2. {w.fill('{company} never answers the phone.')}\n3. {w.fill('The {food} was wonderful!')}",
    ]
    return w.rng.choice(forms)


def _data(w: _Words) -> str:
    rows = [
        (w.word(f"name{i or ''}"), w.word(f"city{i or ''}"), w.number(18, 80)) for i in range(w.number(2, 5))
    ]
    lines = "\n".join(f"{name},{city},{age}" for name, city, age in rows)
    prose = " ".join(f"{name} is {age} and lives in {city}." for name, city, age in rows)
    forms = [
        f"Turn this CSV into a Markdown table:\n\nname,city,age\n{lines}",
        f"Turn this into JSON, one object per person: {prose}",
        f"Who is the oldest person in this list, and what is the average age?\n\nname,city,age\n{lines}",
        f"Write an SQL statement that creates a table for these rows and inserts them:\n\n{lines}",
        f"Sort these people by age and print them as a numbered list: {prose}",
        f"Write one sentence about each row:\n\nname,city,age\n{lines}",
        f"Write Python code that reads this text into a list of dictionaries:\n\nname,city,age\n{lines}",
    ]
    return w.rng.choice(forms)


_MADE: dict[str, Callable[[_Words], str]] = {
    "arithmetic": _arithmetic,
    "reasoning": _reasoning,
    "passage": _passage,
    "rewrite": _rewrite,
    "classify": _classify,
    "data": _data,
}


def _casual(text: str, rng: random.Random) -> str:
    """Write the way many people type: no capital at the front, no final stop, a word of greeting."""
    if "\n" in text or not text[0].isalpha() or text.split()[0] in {"I", "I'm"}:
        return text
    lowered = text[0].lower() + text[1:]
    return rng.choice(
        [
            lowered.rstrip("."),
            lowered,
            f"hey, {lowered}",
            f"Please {lowered}" if not text.endswith("?") else text,
            f"{text} Thanks!",
        ]
    )


def iterate_prompts(seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield distinct conversations without end: ``id``, ``category`` and ``turns``.

    Raises:
        ConfigError: No new first turn was found in many tries; the lists are used up (beyond 100,000).
    """
    rng = random.Random(f"specdec-tap prompts {seed}")
    families, weights = list(WEIGHTS), list(WEIGHTS.values())
    seen: set[str] = set()
    while True:
        for _ in range(MAX_TRIES_PER_PROMPT):
            family = rng.choices(families, weights)[0]
            words = _Words(rng)
            if family in _MADE:
                text = _MADE[family](words)
            else:
                text = words.fill(rng.choice(_load("templates.yaml")[family]))
            if rng.random() < CASUAL_SHARE:
                text = _casual(text, rng)
            if text not in seen:
                break
        else:
            raise ConfigError(f"no new prompt after {len(seen):,}; take another seed or fewer prompts")
        seen.add(text)
        turns = [text]
        if rng.random() < FOLLOW_UP_SHARE:
            turns += rng.sample(_load("words.yaml")["follow_up"], rng.choice([1, 1, 2]))
        yield {"id": f"made-{seed}-{len(seen) - 1}", "category": family, "turns": turns}


def write_prompts(path: Path, count: int, seed: int = 0) -> None:
    """Write ``count`` conversations to a jsonl file, atomically.

    Raises:
        InputError: The file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for _, prompt in zip(range(count), iterate_prompts(seed), strict=False):
                file.write(json.dumps(prompt) + "\n")
        temporary.replace(path)
    except OSError as err:
        raise InputError(f"prompt file {str(path)!r} cannot be written ({err.strerror or err})") from err


def main(argv: list[str] | None = None) -> int:
    """Write a prompt file; prints nothing but errors."""
    parser = argparse.ArgumentParser(
        prog="python -m specdec_tap.prompts", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--count", type=int, default=600, help="number of conversations (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="same seed, same prompts (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="jsonl to write")
    args = parser.parse_args(argv)
    if args.count < 1:
        parser.error(f"--count is {args.count}; expected 1 or more")
    try:
        write_prompts(args.out, args.count, args.seed)
    except (ConfigError, InputError) as err:
        print(err, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
