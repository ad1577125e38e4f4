"""Generate sentences: everyday requests and short news, drawn from templates.

{name} is an item of a list, (a|b) one of the choices, [a] is a or nothing, each equally likely. The grammar has about 350 words
and millions of sentences, enough to draw all sets without a common sentence. The spelling of the words is data: changing a word
changes the corpora.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from random import Random

from roundelay.errors import UsageError

LISTS: dict[str, str] = {
    "digit": "zero one two three four five six seven eight nine",
    "hour": "one two three four five six seven eight nine ten eleven twelve",
    "minutes": "five ten fifteen twenty thirty forty fifty",
    "few": "two three four five six seven eight nine ten twelve twenty",
    "ordinal": "first second third fourth fifth sixth seventh ninth tenth",
    "name": (
        "alice peter martha oliver susan victor hannah george laura simon clara robert nina walter emma thomas "
        "barbara felix ruth arthur monica leonard jasmine edgar"
    ),
    "family": "mother father brother sister uncle grandmother neighbour doctor teacher boss",  # language: ok
    "day": "monday tuesday wednesday thursday friday saturday sunday",
    "month": "january february march april may june july august september october november december",
    "when": "today, tonight, tomorrow, this morning, this evening, next week, this weekend, before lunch, after dinner",
    "room": "kitchen bedroom bathroom garage garden office hallway cellar",
    "device": "light heater radio television fan lamp oven printer alarm window door",
    "color": "red blue green yellow white black brown orange purple grey",  # language: ok
    "city": "london paris berlin madrid vienna dublin boston chicago oslo lisbon",
    "place": "station airport market museum library hospital harbour theatre bakery bridge school",
    "food": "bread butter cheese apples onions potatoes coffee sugar carrots pepper noodles",
    "drink": "water milk tea juice beer lemonade",
    "amount": "some, more, plenty of, a cup of, a bag of, two boxes of, half a pound of",
    "thing": "letter parcel ticket camera bicycle jacket umbrella wallet hammer blanket basket mirror candle bottle",
    "animal": "dog cat horse rabbit chicken donkey duck goat kitten",
    "weather": "sunny cloudy windy rainy foggy stormy freezing warm dry",
    "music": "jazz piano guitar violin folk dance orchestra",
    "mood": "quiet loud happy gentle slow famous",
    "size": "small large heavy little tiny old broken empty wooden",
    "vehicle": "train bus ferry plane taxi tram",
    "did": "found lost bought sold painted borrowed carried dropped repaired hid",
    "moved": "walked jumped slept waited ran played sang shouted laughed",
    "where": (
        "under the table, behind the house, near the river, across the road, beside the church, on the roof"  # language: ok
    ),
    "greeting": "hello, good morning, good evening, excuse me, thank you, sorry",
}

TEMPLATES: tuple[tuple[int, str], ...] = (
    (2, "[please] (turn on|turn off|check) the {color} {device}"),
    (2, "(open|close|clean|lock) the {room} {device}"),
    (2, "call (my {family}|{name}) {when}"),
    (3, "(call|dial) {digit} {digit} {digit} {digit} [{digit}]"),
    (2, "code {digit} {digit} {digit} {digit}"),
    (1, "wake {name} at {hour} {minutes} on {day}"),
    (2, "set (a timer|an alarm) for {few} (minutes|hours|seconds) {when}"),
    (2, "(remind|tell) {name} to (buy|bring|order) ({food}|{drink})"),
    (3, "buy {food} {food} and {drink} for {name}"),
    (2, "{name} (needs|wants|ordered) {amount} ({food}|{drink})"),
    (2, "(will it be|is it) {weather} in {city} {when}"),
    (2, "{day} (was|is|will be) {weather} and {weather} in {city}"),
    (1, "the {vehicle} to {city} leaves at {hour} {minutes}"),
    (2, "(find|show me) the nearest {place} in {city}"),
    (2, "{name} (met|meets) {name} (at|near|behind) the {place} [on {day}]"),
    (2, "play {mood} {music} for {name}"),
    (3, "{name} {did} {few} {color} {thing}s"),
    (2, "{name} {did} my {size} {thing} {where}"),
    (2, "(my|your) {family} {did} the {color} {thing} {when}"),
    (3, "{few} {color} {animal}s {moved} {where}"),
    (2, "(my|your) {size} {animal} {moved} {when}"),
    (2, "(the meeting|the party|my birthday) is {day} the {ordinal} of {month}"),  # language: ok
    (2, "{name} {name} and {name} {moved} {when}"),
    (2, "bring {few} {size} {thing}s to {name}"),
    (1, "{greeting} {name} how is your {family}"),
    (2, "send {name} {few} {thing}s from {city}"),
    (1, "how many {thing}s does (my {family}|{name}) (need|want)"),
    (1, "(where|when) did {name} (leave|hide|buy) the {color} {thing}"),
    (1, "(read|write|delete) {ordinal} message from {name}"),
)

ITEMS = {name: [item.strip() for item in (text.split(",") if "," in text else text.split())] for name, text in LISTS.items()}
_WEIGHTS = list(accumulate(weight for weight, _ in TEMPLATES))
_INNERMOST = re.compile(r"\{(?P<list>\w+)\}|\((?P<choice>[^()\[\]{}]*)\)|\[(?P<maybe>[^()\[\]{}]*)\]")
PATIENCE = 200
"""Consecutive draws without a new sentence after which the grammar counts as exhausted."""


def sentences(rng: Random) -> Iterator[tuple[str, ...]]:
    """Yield random sentences in capitals without end. Sentences may repeat."""
    while True:
        _, text = TEMPLATES[bisect_right(_WEIGHTS, rng.random() * _WEIGHTS[-1])]
        while hole := _INNERMOST.search(text):
            if hole["list"] is not None:
                choices = ITEMS[hole["list"]]
            else:
                choices = hole["choice"].split("|") if hole["choice"] is not None else [hole["maybe"], ""]
            chosen = choices[int(rng.random() * len(choices))]
            text = text[: hole.start()] + chosen + text[hole.end() :]
        yield tuple(text.upper().split())


def draw(seed: int, counts: Mapping[str, int]) -> dict[str, list[tuple[str, ...]]]:
    """Return `counts[name]` distinct sentences for each set, with no sentence in two sets.

    Raises UsageError if the grammar has too few sentences.
    """
    rng = Random(f"sentences {seed}")
    total = sum(counts.values())
    distinct: dict[tuple[str, ...], None] = {}
    idle = 0
    for sentence in sentences(rng):
        if len(distinct) == total:
            break
        idle = 0 if sentence not in distinct else idle + 1
        if idle > PATIENCE:
            raise UsageError(
                f"the grammar has fewer than {total} distinct sentences", hint="request fewer utterances or less text"
            )
        distinct[sentence] = None
    # Small templates are exhausted early; shuffling gives all sets the same mixture of templates.
    shuffled = list(distinct)
    rng.shuffle(shuffled)
    sets: dict[str, list[tuple[str, ...]]] = {}
    for name, count in counts.items():
        sets[name], shuffled = shuffled[:count], shuffled[count:]
    return sets


def vocabulary() -> list[str]:
    """Return all words of the grammar, sorted."""
    words: set[str] = set()
    for _, text in TEMPLATES:
        for plural in re.findall(r"\{(\w+)\}s", text):
            words.update(item.upper() + "S" for item in ITEMS[plural])
        whole = re.sub(r"\{(\w+)\}s?", lambda hole: "" if hole[0].endswith("s") else " ".join(ITEMS[hole[1]]), text)
        words.update(re.sub(r"[()|\[\]]", " ", whole).upper().split())
    return sorted(words)
