"""Draws who sends what and when, one picture per strategy: `make docs` runs this, a test compares it with the pictures in the tree.

Each function below is the strategy's schedule in miniature: lengths are units, not measurements.

python docs/_make/timelines.py          writes docs/pictures/*.svg
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from drawing import Picture

FOLDER = Path(__file__).parents[1] / "pictures"
GRADIENT, MOVE, MEAN = 3.0, 0.35, 0.8


def single() -> Picture:
    p = Picture("single: one learner, nothing is sent", 14)
    me, t = p.lane("learner 0"), 0.0
    while t < p.span:
        t = p.bar(me, t, t + GRADIENT, "gradient", "gradient")
        t = p.bar(me, t, t + MOVE, "move")
    return p


def sync() -> Picture:
    p = Picture("sync: buckets of the gradient travel during backward; everybody waits for the last one", 14)
    lanes, lengths = [p.lane(f"learner {i}") for i in range(3)], (2.6, 3.0, 4.2)
    t = 0.0
    while t < p.span:
        met = t + max(lengths) + 0.35
        for me, length in zip(lanes, lengths, strict=True):
            p.bar(me, t, t + length, "gradient", "gradient")
            p.bar(me, t + length, met, "wait", "waits")
            for part in range(3):
                left = t + length * (0.45 + 0.19 * part)
                p.bar(me, left, left + length * 0.17 if part < 2 else met, "comm", below=True)
            p.bar(me, met, met + MOVE, "move")
        p.link(lanes[0], lanes[-1], met, "comm")
        t = met + MOVE
    return p


def asgd() -> Picture:
    p = Picture("asgd: learner 0's vector is the server; add a displacement, get the model back", 14)
    lanes, lengths = [p.lane(name) for name in ("learner 0 (W)", "learner 1", "learner 2")], (2.3, 2.9, 4.1)
    for n, (me, length) in enumerate(zip(lanes, lengths, strict=True)):
        t = 0.0
        while t < p.span:
            t = p.bar(me, t, t + length, "gradient", "gradient")
            if n == 0:
                t = p.bar(me, t, t + MOVE, "move")
            else:
                p.link(me, lanes[0], t + 0.05, "comm", arrow=True, end=t + 0.35)
                p.link(lanes[0], me, t + 0.5, "comm", arrow=True, end=t + 0.85)
                t = p.bar(me, t, t + 0.9, "wait")
    return p


def averages(p: Picture, filtered: bool) -> Picture:
    lanes, lengths = [p.lane(f"learner {i}") for i in range(3)], (0.9, 1.0, 1.25)
    t = 0.0
    while t < p.span:
        met = t + 4 * (max(lengths) + 0.12)
        for me, length in zip(lanes, lengths, strict=True):
            u = t
            for _ in range(4):
                u = p.bar(me, u, u + length, "gradient", "g")
                u = p.bar(me, u, u + 0.12, "move")
            p.bar(me, u, met, "wait", "waits")
            p.bar(me, met, met + MEAN, "comm", "mean")
            if filtered:
                p.bar(me, met + MEAN, met + MEAN + 0.5, "move")
        p.link(lanes[0], lanes[-1], met + 0.05, "comm")
        t = met + MEAN + (0.5 if filtered else 0.0)
    return p


def kstep() -> Picture:
    return averages(Picture("kstep: K = 4 local steps, then the mean of the models", 14), filtered=False)


def adaptive_kstep() -> Picture:
    return averages(Picture("adaptive_kstep: as kstep; K follows the spread between learners", 14), filtered=False)


def kaldi_averaging() -> Picture:
    return averages(Picture("kaldi_averaging: as kstep; the first averages are the best model", 14), filtered=False)


def bmuf() -> Picture:
    return averages(Picture("bmuf: as kstep; then every learner filters the same mean by itself", 14), filtered=True)


def dpsgd() -> Picture:
    p = Picture("dpsgd: w goes to both neighbours while the gradient is taken at that same w", 14)
    lanes = [p.lane(f"learner {name}") for name in ("i-1", "i", "i+1")]
    t = 0.0
    while t < p.span:
        for n, me in enumerate(lanes):
            p.bar(me, t, t + GRADIENT, "gradient", "gradient")
            p.bar(me, t + 0.1, t + 2.2, "comm", below=True)
            p.bar(me, t + GRADIENT, t + GRADIENT + MOVE, "move")
            if n:
                p.link(lanes[n - 1], me, t + 0.45, "comm", arrow=True, end=t + 1.6, below=True)
                p.link(me, lanes[n - 1], t + 0.45, "comm", arrow=True, end=t + 1.6, below=True)
        t += GRADIENT + MOVE
    return p


def adpsgd() -> Picture:
    p = Picture("adpsgd: agents meet in pairs in the background; no gradient waits, and the slow one is not waited for", 14)
    lanes, lengths = [p.lane(f"learner {i}" + (" (slow)" if i == 1 else "")) for i in range(4)], (2.0, 4.9, 2.15, 2.0)
    for me, length in zip(lanes, lengths, strict=True):
        t = 0.0
        while t < p.span:
            t = p.bar(me, t, t + length, "gradient", "gradient")
            t = p.bar(me, t, t + 0.25, "move")
    for number in range(6):
        t = 1.1 + 2.25 * number
        for a, b in ((0, 1), (2, 3)) if number % 2 == 0 else ((1, 2), (0, 3)):
            shift = 0.28 if (a, b) == (0, 3) else 0.0
            p.link(a, b, t + shift, "meet", below=True)
            for me in (a, b):
                p.bar(me, t + shift - 0.25, t + shift + 0.25, "meet", below=True)
    return p


def delay_by_one() -> Picture:
    p = Picture("delay_by_one: the mean of all w travels behind the gradient, which is taken at the un-averaged w", 14)
    lanes = [p.lane(f"learner {i}") for i in range(3)]
    t = 0.0
    while t < p.span:
        for me, length in zip(lanes, (2.8, 3.0, 2.9), strict=True):
            p.bar(me, t, t + length, "gradient", "gradient")
            p.bar(me, t + 0.05, t + 2.55, "comm", below=True)
            p.bar(me, t + 3.0, t + 3.0 + MOVE, "move")
        p.link(lanes[0], lanes[-1], t + 2.5, "comm", below=True)
        t += 3.0 + MOVE
    return p


def hierarchical() -> Picture:
    p = Picture("hierarchical(adpsgd): a mean inside each machine, exchanges between their first learners", 14)
    lanes = [p.lane(name) for name in ("A: rank 0", "A: rank 1", "B: rank 2", "B: rank 3")]
    for first, length in ((0, 2.2), (2, 3.1)):
        t = 0.0
        while t < p.span:
            for me in (lanes[first], lanes[first + 1]):
                p.bar(me, t, t + 0.35, "comm", below=True)
                p.bar(me, t + 0.35, t + 0.35 + length, "gradient", "gradient")
                p.bar(me, t + 0.1 + length, t + 0.65 + length, "comm", below=True)
            p.bar(lanes[first], t + 0.65 + length, t + 0.65 + length + MOVE, "move")
            p.link(lanes[first], lanes[first + 1], t + 0.4 + length, "comm", below=True)
            t += 0.65 + length + MOVE
    for number in range(5):
        p.link(lanes[0], lanes[2], 1.6 + 2.7 * number, "meet", below=True)
        for me in (lanes[0], lanes[2]):
            p.bar(me, 1.35 + 2.7 * number, 1.85 + 2.7 * number, "meet", below=True)
    return p


PICTURES: dict[str, Callable[[], Picture]] = {
    f.__name__: f
    for f in (single, sync, asgd, kstep, adaptive_kstep, kaldi_averaging, bmuf, dpsgd, adpsgd, delay_by_one, hierarchical)
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
