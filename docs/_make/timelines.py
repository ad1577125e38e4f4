"""Draw one timeline per strategy: gradients, updates, waiting and communication. `make docs` runs this; a test compares the output.

Each function below draws the schedule of one strategy. Lengths are units, not measurements.

python docs/_make/timelines.py          write docs/pictures/*.svg
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from drawing import Timeline

FOLDER = Path(__file__).parents[1] / "pictures"
GRADIENT, UPDATE, MEAN = 3.0, 0.35, 0.8


def single() -> Timeline:
    p = Timeline("single: one learner, no communication", 14)
    me, t = p.lane("learner 0"), 0.0
    while t < p.span:
        t = p.bar(me, t, t + GRADIENT, "gradient", "gradient")
        t = p.bar(me, t, t + UPDATE, "update")
    return p


def sync() -> Timeline:
    p = Timeline("sync: buckets of the gradient are reduced during backward; all learners wait for the slowest", 14)
    lanes, lengths = [p.lane(f"learner {i}") for i in range(3)], (2.6, 3.0, 4.2)
    t = 0.0
    while t < p.span:
        done = t + max(lengths) + 0.35
        for me, length in zip(lanes, lengths, strict=True):
            p.bar(me, t, t + length, "gradient", "gradient")
            p.bar(me, t + length, done, "wait", "waits")
            for part in range(3):
                left = t + length * (0.45 + 0.19 * part)
                p.bar(me, left, left + length * 0.17 if part < 2 else done, "comm", below=True)
            p.bar(me, done, done + UPDATE, "update")
        p.link(lanes[0], lanes[-1], done, "comm")
        t = done + UPDATE
    return p


def asgd() -> Timeline:
    p = Timeline("asgd: learner 0 is the parameter server; other learners add an update and get the model", 14)
    lanes, lengths = [p.lane(name) for name in ("learner 0 (W)", "learner 1", "learner 2")], (2.3, 2.9, 4.1)
    for n, (me, length) in enumerate(zip(lanes, lengths, strict=True)):
        t = 0.0
        while t < p.span:
            t = p.bar(me, t, t + length, "gradient", "gradient")
            if n == 0:
                t = p.bar(me, t, t + UPDATE, "update")
            else:
                p.link(me, lanes[0], t + 0.05, "comm", arrow=True, end=t + 0.35)
                p.link(lanes[0], me, t + 0.5, "comm", arrow=True, end=t + 0.85)
                t = p.bar(me, t, t + 0.9, "wait")
    return p


def averages(p: Timeline, filtered: bool) -> Timeline:
    lanes, lengths = [p.lane(f"learner {i}") for i in range(3)], (0.9, 1.0, 1.25)
    t = 0.0
    while t < p.span:
        done = t + 4 * (max(lengths) + 0.12)
        for me, length in zip(lanes, lengths, strict=True):
            u = t
            for _ in range(4):
                u = p.bar(me, u, u + length, "gradient", "g")
                u = p.bar(me, u, u + 0.12, "update")
            p.bar(me, u, done, "wait", "waits")
            p.bar(me, done, done + MEAN, "comm", "mean")
            if filtered:
                p.bar(me, done + MEAN, done + MEAN + 0.5, "update")
        p.link(lanes[0], lanes[-1], done + 0.05, "comm")
        t = done + MEAN + (0.5 if filtered else 0.0)
    return p


def kstep() -> Timeline:
    return averages(Timeline("kstep: K = 4 local steps, then the mean of the models", 14), filtered=False)


def adaptive_kstep() -> Timeline:
    return averages(Timeline("adaptive_kstep: as kstep; K follows the spread between learners", 14), filtered=False)


def kaldi_averaging() -> Timeline:
    return averages(Timeline("kaldi_averaging: as kstep; the first averages are the best model", 14), filtered=False)


def bmuf() -> Timeline:
    return averages(Timeline("bmuf: as kstep, then each learner applies the same filter to the mean", 14), filtered=True)


def dpsgd() -> Timeline:
    p = Timeline("dpsgd: w is sent to both neighbors while the gradient is computed at the same w", 14)
    lanes = [p.lane(f"learner {name}") for name in ("i-1", "i", "i+1")]
    t = 0.0
    while t < p.span:
        for n, me in enumerate(lanes):
            p.bar(me, t, t + GRADIENT, "gradient", "gradient")
            p.bar(me, t + 0.1, t + 2.2, "comm", below=True)
            p.bar(me, t + GRADIENT, t + GRADIENT + UPDATE, "update")
            if n:
                p.link(lanes[n - 1], me, t + 0.45, "comm", arrow=True, end=t + 1.6, below=True)
                p.link(me, lanes[n - 1], t + 0.45, "comm", arrow=True, end=t + 1.6, below=True)
        t += GRADIENT + UPDATE
    return p


def adpsgd() -> Timeline:
    p = Timeline("adpsgd: pairs of learners exchange in the background; no gradient waits, not even for a slow learner", 14)
    lanes, lengths = [p.lane(f"learner {i}" + (" (slow)" if i == 1 else "")) for i in range(4)], (2.0, 4.9, 2.15, 2.0)
    for me, length in zip(lanes, lengths, strict=True):
        t = 0.0
        while t < p.span:
            t = p.bar(me, t, t + length, "gradient", "gradient")
            t = p.bar(me, t, t + 0.25, "update")
    for number in range(6):
        t = 1.1 + 2.25 * number
        for a, b in ((0, 1), (2, 3)) if number % 2 == 0 else ((1, 2), (0, 3)):
            shift = 0.28 if (a, b) == (0, 3) else 0.0
            p.link(a, b, t + shift, "exchange", below=True)
            for me in (a, b):
                p.bar(me, t + shift - 0.25, t + shift + 0.25, "exchange", below=True)
    return p


def delay_by_one() -> Timeline:
    p = Timeline("delay_by_one: the mean of all w is reduced during the gradient, which is computed at the un-averaged w", 14)
    lanes = [p.lane(f"learner {i}") for i in range(3)]
    t = 0.0
    while t < p.span:
        for me, length in zip(lanes, (2.8, 3.0, 2.9), strict=True):
            p.bar(me, t, t + length, "gradient", "gradient")
            p.bar(me, t + 0.05, t + 2.55, "comm", below=True)
            p.bar(me, t + 3.0, t + 3.0 + UPDATE, "update")
        p.link(lanes[0], lanes[-1], t + 2.5, "comm", below=True)
        t += 3.0 + UPDATE
    return p


def hierarchical() -> Timeline:
    p = Timeline("hierarchical(adpsgd): a mean inside each node, exchanges between the node leaders", 14)
    lanes = [p.lane(name) for name in ("A: rank 0", "A: rank 1", "B: rank 2", "B: rank 3")]
    for first, length in ((0, 2.2), (2, 3.1)):
        t = 0.0
        while t < p.span:
            for me in (lanes[first], lanes[first + 1]):
                p.bar(me, t, t + 0.35, "comm", below=True)
                p.bar(me, t + 0.35, t + 0.35 + length, "gradient", "gradient")
                p.bar(me, t + 0.1 + length, t + 0.65 + length, "comm", below=True)
            p.bar(lanes[first], t + 0.65 + length, t + 0.65 + length + UPDATE, "update")
            p.link(lanes[first], lanes[first + 1], t + 0.4 + length, "comm", below=True)
            t += 0.65 + length + UPDATE
    for number in range(5):
        p.link(lanes[0], lanes[2], 1.6 + 2.7 * number, "exchange", below=True)
        for me in (lanes[0], lanes[2]):
            p.bar(me, 1.35 + 2.7 * number, 1.85 + 2.7 * number, "exchange", below=True)
    return p


PICTURES: dict[str, Callable[[], Timeline]] = {
    f.__name__: f
    for f in (single, sync, asgd, kstep, adaptive_kstep, kaldi_averaging, bmuf, dpsgd, adpsgd, delay_by_one, hierarchical)
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
