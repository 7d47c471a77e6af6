"""Write tales.txt: short tales from a small grammar, the same text on every machine.

The grammar has people who keep their trade through a tale, places that return, and couplets that rhyme, so
that a character model has something to learn at every range: letters, words, sentences, who it is about.

    python examples/data/make_text.py
"""

from __future__ import annotations

import random
from pathlib import Path

NUM_TALES = 700

PEOPLE = [
    ("Ada", "the miller", "she", "her"),
    ("Tom", "the ferryman", "he", "his"),
    ("Ines", "the smith", "she", "her"),
    ("Odo", "the shepherd", "he", "his"),
    ("Mira", "the weaver", "she", "her"),
    ("Finn", "the baker", "he", "his"),
    ("Runa", "the gardener", "she", "her"),
    ("Karl", "the piper", "he", "his"),
]
PLACES = [
    "the old bridge",
    "the market",
    "the hill",
    "the river",
    "the harbour",
    "the north road",
    "the wood",
]
WEATHER = [
    "It had rained all night.",
    "The morning was clear.",
    "Snow lay on the fields.",
    "A cold wind blew.",
]
ANIMALS = ["a grey goose", "a lame fox", "a black dog", "an owl", "a white hare"]
THINGS = ["a silver key", "a broken wheel", "a sack of corn", "a red lantern", "a letter without a name"]
FEELINGS = ["was glad", "was afraid", "said nothing", "laughed", "was silent for a while"]
COUPLETS = [
    ("The road is long, the night is near,", "but one who sings has none to fear."),
    ("The river runs, the wheel goes round,", "and what was lost will yet be found."),
    ("The moon is high, the lamp is low,", "and where you went I mean to go."),
    ("The bread is warm, the door is wide,", "so leave the winter there outside."),
]


def tale(rng: random.Random) -> str:
    (name, trade, pronoun, possessive), (other, other_trade, _, _) = rng.sample(PEOPLE, 2)
    place, second_place = rng.sample(PLACES, 2)
    animal, thing = rng.choice(ANIMALS), rng.choice(THINGS)
    day = rng.choice(["One day", "Long ago", "Before the harvest", "On the last day of the year"])
    lines = [
        f"{day} {name} {trade} went to {place}.",
        rng.choice(WEATHER),
        f"There {pronoun} saw {animal}, and beside it lay {thing}.",
    ]
    if rng.random() < 0.6:
        lines.append(f'"Whose is this?" asked {name}. {other} {other_trade} {rng.choice(FEELINGS)}.')
    if rng.random() < 0.5:
        lines.append(f"So {pronoun} took {thing} under {possessive} arm and walked to {second_place}.")
    else:
        lines.append(f"But {name} left {thing} where it was and followed {animal} to {second_place}.")
    if rng.random() < 0.5:
        lines.append(f"All the way {name} sang:\n  " + "\n  ".join(rng.choice(COUPLETS)))
    lines.append(rng.choice([f"Then {name} {trade} went home.", f"And {name} {rng.choice(FEELINGS)}."]))
    return "\n".join(lines)


def text(num_tales: int = NUM_TALES) -> str:
    rng = random.Random(20)
    return "\n\n".join(tale(rng) for _ in range(num_tales)) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("tales.txt").write_text(text(), encoding="ascii")
