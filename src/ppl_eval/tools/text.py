"""The embedded text: a seeded generator of three domains in which context helps.

A tale keeps its people, places and things; a bill keeps its prices and adds up; a program prints
what its variables hold. A model that reads only the last token can know none of this.

    python -m ppl_eval.tools.text 1000 > train.jsonl

gives documents to train on, none of which is in the held-out text.
"""

import argparse
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator

from ppl_eval import boundary
from ppl_eval.shipped import embedded_path

_NAMES = (
    "Ada Bela Cem Dora Emil Fay Gita Hugo Ines Jon Kira Leo Mara Nils Olga Pia Quin Rosa Sami Tara"
    " Ugo Vera Wim Xenia Yara Zeno"
).split()
_ANIMALS = "cat dog goat hen fox owl horse mouse duck crow bear hare".split()
_PLACES = (
    "mill harbour forest market tower meadow bridge cellar garden school attic kitchen".split()
)
_THINGS = "lamp key coin rope letter bell drum basket map ladder kite spoon".split()
_COLOURS = "red blue green white black yellow grey brown".split()
_MOODS = "tired happy angry proud afraid curious sad calm".split()
_GOODS = "apples pears nails candles eggs plums ribbons bricks onions books cups hats".split()
_VARIABLES = "a b c n m k x y total count left right size".split()


def _tale(rng: random.Random, sentences: int) -> str:
    hero, friend = rng.sample(_NAMES, 2)
    animal, thing, colour = rng.choice(_ANIMALS), rng.choice(_THINGS), rng.choice(_COLOURS)
    place, other_place = rng.sample(_PLACES, 2)
    mood = rng.choice(_MOODS)
    lines = [f"{hero} lived near the {place} with a {colour} {animal}."]
    turns: list[Callable[[], str]] = [
        lambda: f"One day {hero} lost the {thing} in the {other_place}.",
        lambda: f"The {colour} {animal} was {mood} and did not want to go to the {other_place}.",
        lambda: f'"Where is my {thing}?" asked {hero}.',
        lambda: f'"I saw the {thing} in the {other_place}," said {friend}.',
        lambda: f"So {hero} and {friend} walked from the {place} to the {other_place}.",
        lambda: f"{friend} looked under the bench, but the {thing} was not there.",
        lambda: f"Then the {animal} found the {thing}, and {hero} was no longer {mood}.",
        lambda: f'"Thank you," said {hero} to {friend}, and they went back to the {place}.',
        lambda: f"In the evening {friend} gave the {animal} some bread.",
        lambda: f"{hero} put the {thing} next to the {colour} {animal} and slept.",
    ]
    step = 0
    while len(lines) < sentences:
        lines.append(turns[step % len(turns)]())
        step += 1 if rng.random() < 0.8 else 2
        if step % len(turns) == 0:  # another day, another thing
            thing, mood = rng.choice(_THINGS), rng.choice(_MOODS)
            other_place = rng.choice([p for p in _PLACES if p != place])
    return " ".join(lines)


def _bill(rng: random.Random, lines: int) -> str:
    buyer = rng.choice(_NAMES)
    prices = {good: rng.randint(2, 9) for good in rng.sample(_GOODS, 4)}
    text = [f"Bill for {buyer}."]
    text += [f"{good} cost {price} each." for good, price in prices.items()]
    total = 0
    for _ in range(max(lines - len(text), 1)):
        good = rng.choice(list(prices))
        number = rng.randint(2, 9)
        cost = number * prices[good]
        text.append(
            f"{number} {good} at {prices[good]} make {cost}; {total} + {cost} = {total + cost}."
        )
        total = (total + cost) % 100
        if total < cost:
            text.append(f"{buyer} pays 100 and owes {total}.")
    text.append(f"{buyer} still owes {total}.")
    return "\n".join(text)


def _program(rng: random.Random, lines: int) -> str:
    names = rng.sample(_VARIABLES, 3)
    values = {name: rng.randint(0, 9) for name in names}
    text = [f"{name} = {value}" for name, value in values.items()]
    while len(text) < lines:
        name, other = rng.sample(names, 2)
        match rng.randrange(3):
            case 0:
                text.append(f"print({name})  # {values[name]}")
            case 1:
                values[name] = (values[name] + values[other]) % 10
                text.append(f"{name} = ({name} + {other}) % 10")
            case _:
                relation = "<" if values[name] < values[other] else ">="
                text.append(f"assert {name} {relation} {other}")
    text.append(f"print({names[0]})  # {values[names[0]]}")
    return "\n".join(text)


_DOMAINS: dict[str, Callable[[random.Random, int], str]] = {
    "tale": _tale,
    "bill": _bill,
    "program": _program,
}


def documents(seed: int) -> Iterator[dict[str, str]]:
    """Endless documents: ``id``, ``domain`` and ``text``; lengths from a line to some hundred.

    Args:
        seed: the same seed gives the same documents.
    """
    rng = random.Random(seed)
    number = 0
    while True:
        domain = rng.choice(list(_DOMAINS))
        lines = min(1 + int(rng.expovariate(1 / 12)), 150)
        yield {"id": f"{domain}-{number}", "domain": domain, "text": _DOMAINS[domain](rng, lines)}
        number += 1


def training_documents(count: int, seed: int) -> Iterator[dict[str, str]]:
    """The first ``count`` documents of a seed that are not in the held-out text."""
    lines = (embedded_path("tiny_text") / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    held_out = {json.loads(line)["text"] for line in lines}
    unseen = (row for row in documents(seed) if row["text"] not in held_out)
    return itertools.islice(unseen, count)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m ppl_eval.tools.text")
    parser.add_argument("count", type=int, help="how many documents")
    parser.add_argument("--seed", type=int, default=3, help="1 made the teacher, 2 the held-out")
    args = parser.parse_args()
    for row in training_documents(args.count, args.seed):
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    boundary.guarded(main, alone=True)
