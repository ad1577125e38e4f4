"""Draw the three pictures of docs/architecture.md: the packages in layers, and two walks through them.

python docs/_make/architecture.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path

from drawing import DARK, LIGHT

FOLDER = Path(__file__).parents[1] / "pictures"
WIDTH = 860
BOX_KINDS = ("engine", "speech", "top", "base")
FILLS = {
    "light": {"engine": "#d5ebe7", "speech": "#fbe3cd", "top": "#e6def4", "base": "#ecece6"},
    "dark": {"engine": "#22443f", "speech": "#4d371f", "top": "#3b3152", "base": "#343c40"},
}


@dataclass
class Diagram:
    """Boxes with a heading and a line of text, and arrows between points."""

    title: str
    height: int
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, heading: str, text: str = "", kind: str = "engine") -> None:
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/>')
        middle = x + width / 2
        lines = text.split("\n") if text else []
        top = y + height / 2 + 4 - 7 * len(lines)
        self.parts.append(f'<text class="name" x="{middle}" y="{top:.0f}" text-anchor="middle">{escape(heading)}</text>')
        for number, line in enumerate(lines, 1):
            y_line = top + 14 * number
            self.parts.append(f'<text class="small" x="{middle}" y="{y_line:.0f}" text-anchor="middle">{escape(line)}</text>')

    def arrow(self, points: Sequence[tuple[float, float]], label: str = "", at: tuple[float, float] | None = None) -> None:
        path = " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
        self.parts.append(f'<polyline class="arrow" points="{path}" marker-end="url(#head)"/>')
        if label and at:
            self.parts.append(f'<text class="small" x="{at[0]}" y="{at[1]}">{escape(label)}</text>')

    def note(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        self.parts.append(f'<text class="small" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>')

    def svg(self) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" height="{self.height}" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{style()}</style>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
                '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
                f'<rect class="back" width="{WIDTH}" height="{self.height}" rx="6"/>',
                f'<text class="title" x="14" y="22">{escape(self.title)}</text>',
                *self.parts,
                "</svg>\n",
            ]
        )


def style() -> str:
    def scheme(colors: dict[str, str], fills: dict[str, str]) -> str:
        boxes = "".join(f".{kind}{{fill:{fills[kind]};stroke:{colors['line']}}}" for kind in BOX_KINDS)
        text = f".title,.name{{fill:{colors['text']}}}.small{{fill:{colors['faint']}}}.back{{fill:{colors['back']}}}"
        return f"{boxes}{text}.arrow{{fill:none;stroke:{colors['faint']};stroke-width:1.4}}.head{{fill:{colors['faint']}}}"

    fonts = "text{font:11px system-ui,sans-serif}.title{font-weight:600;font-size:13px}.name{font-size:12.5px;font-weight:600}"
    dark = scheme(DARK, FILLS["dark"])
    return f"{fonts}{scheme(LIGHT, FILLS['light'])}@media(prefers-color-scheme:dark){{{dark}}}"


LAYERS: list[tuple[list[tuple[str, str]], str]] = [
    ([("cli", "one file per command")], "top"),
    ([("recipes", "the speech pipeline: stages, run layout, demo")], "top"),
    ([("simulate", "virtual time, plan"), ("bench", "is it worth it here?"), ("replay", "recorded runs again"), ("preflight", "roundelay check")], "top"),
    ([("api", "Session, fit"), ("testing", "conformance checks, example tasks")], "engine"),
    ([("config", "TOML and key=value into dataclasses")], "engine"),
    ([("engine", "learner, trainer, sharding, checkpoint, evaluator, heartbeat")], "engine"),
    ([("launch", "rank, device, launchers, local processes")], "engine"),
    ([("metrics", "events, recorder, TensorBoard, dashboard")], "engine"),
    ([("strategies", "one file per algorithm"), ("topology", "matchings, mixing"), ("optim", "D(g), schedules"), ("data", "archives, loaders")], "engine"),
    ([("comm", "communicators; gossip thread, transport")], "engine"),
    ([("fleet", "store, failed ranks")], "engine"),
    ([("core", "contracts, flat vectors, buckets, kernels, process pools"), ("theory", "the model in numpy")], "base"),
    ([("log", "logging, progress"), ("errors", "message, where, hint")], "base"),
]  # fmt: skip
SIDE = 5  # first and last layer next to which speech and report are drawn
SIDE_END = 8


def packages() -> Diagram:
    high, gap, left, wide, side = 40, 6, 14, 560, 248
    diagram = Diagram("Packages: each imports only packages below it", 40 + len(LAYERS) * (high + gap) + 10)
    for number, (row, kind) in enumerate(LAYERS):
        y = 36 + number * (high + gap)
        total = WIDTH - 2 * left if number < 2 or number >= len(LAYERS) - 2 else wide
        each = (total - gap * (len(row) - 1)) / len(row)
        for place, (name, text) in enumerate(row):
            diagram.box(left + place * (each + gap), y, each, high, name, text, kind)
    top = 36 + SIDE * (high + gap)
    tall = (SIDE_END - SIDE + 1) * (high + gap) - gap
    x = left + wide + 24
    half = (side - gap) / 2
    diagram.box(x, top, half, tall, "speech", "corpora, synth,\nfeatures, hmm,\ngraph, nnet,\ndecode, score", "speech")
    diagram.box(x + half + gap, top, half, tall, "report", "one HTML page\nfrom the files\nof a run", "speech")
    diagram.note(x, top - 10, "know nothing of the engine; joined in recipes")
    diagram.arrow([(x + side / 2, 36 + 2 * (high + gap)), (x + side / 2, top - 26)])
    return diagram


GRADIENT: list[tuple[str, str, str]] = [
    ("recordings", "speech/corpora, speech/synth", "speech"),
    ("features", "speech/features/extract.py", "speech"),
    ("alignments", "speech/hmm/train_gmm.py\nspeech/hmm/align.py", "speech"),
    ("network stage", "recipes/network_stage.py\nN learners: launch/local.py", "top"),
    ("lease of samples", "engine/sharding.py", "engine"),
    ("batch", "data/loader.py\nspeech/nnet/frame_task.py", "engine"),
    ("learning rate", "optim/lr_schedule.py\noptim/adapter.py", "engine"),
    ("strategy step", "engine/learner.py run_step\nstrategies/adpsgd.py step(me)", "engine"),
    ("gradient", "strategies/worker.py grad()\nforward and backward at phi", "engine"),
    ("update", "me.add_(-D(g)): w <- w - D(g)\ncore/kernels.py", "engine"),
    ("final average", "engine/learner.py", "engine"),
    ("graph, decoding", "speech/graph\nspeech/decode.py", "speech"),
    ("word error rate", "speech/score.py", "speech"),
]


def walk_gradient() -> Diagram:
    columns, wide, high, left, top = 4, 188, 62, 20, 44
    step_x, step_y = (WIDTH - 2 * left - wide) / (columns - 1), 112
    rows = -(-len(GRADIENT) // columns)
    diagram = Diagram("Walk 1: one gradient, from audio to a word error rate", top + rows * step_y - 30)
    corners = []
    for number, (name, text, kind) in enumerate(GRADIENT):
        row, column = divmod(number, columns)
        x, y = left + column * step_x, top + row * step_y
        diagram.box(x, y, wide, high, name, text, kind)
        corners.append((x, y))
    for (x0, y0), (x1, y1) in pairwise(corners):
        if y0 == y1:
            diagram.arrow([(x0 + wide, y0 + high / 2), (x1, y1 + high / 2)])
        else:
            middle = y0 + high + 14
            diagram.arrow([(x0 + wide / 2, y0 + high), (x0 + wide / 2, middle), (x1 + wide / 2, middle), (x1 + wide / 2, y1)])
    last_x, last_y = corners[9]
    first_x, first_y = corners[4]
    diagram.arrow(
        [(last_x + 30, last_y), (last_x + 30, last_y - 16), (first_x + 30, last_y - 16), (first_x + 30, first_y + high)]
    )
    diagram.note(last_x + 38, last_y - 12, "next step, until all leases are finished")
    return diagram


def walk_exchange() -> Diagram:
    diagram = Diagram("Walk 2: one model exchange between rank i and rank j", 520)
    wide, high = 250, 58
    left, right, center = 20, WIDTH - 20 - wide, (WIDTH - wide) / 2
    diagram.note(left + wide / 2, 48, "rank i", "middle")
    diagram.note(right + wide / 2, 48, "rank j", "middle")
    for x, letter in ((left, "i"), (right, "j")):
        diagram.box(x, 56, wide, high, "strategy", "strategies/adpsgd.py: me.gossip(topology)\nonce, before the first step")
        diagram.box(
            x,
            146,
            wide,
            high,
            "gossip thread",
            "comm/gossip/thread.py: enters round r\nwhen steps are due or the partner waits",
        )
        diagram.box(
            x, 326, wide, high, "apply", f"w_{letter} += (snapshot of partner - own) / 2\nunder the lock: core/kernels.py"
        )
        diagram.box(x, 430, wide, high, "next gradient", "strategies/worker.py: phi <- w\nnever waits for an exchange")
        diagram.arrow([(x + wide / 2, 56 + high), (x + wide / 2, 146)])
        diagram.arrow([(x + wide / 2, 146 + high), (x + wide / 2, 326)])
        diagram.arrow([(x + wide / 2, 326 + high), (x + wide / 2, 430)])
    diagram.box(
        center, 56, wide, high, "partner of round r", "topology/matchings.py: the same pure\nfunction on every rank", "base"
    )
    diagram.arrow([(center, 56 + high), (left + wide, 160)])
    diagram.arrow([(center + wide, 56 + high), (right, 160)])
    diagram.box(
        center,
        226,
        wide,
        high,
        "other node: snapshots over TCP",
        "comm/gossip/transport.py\nsame node: comm/shared_memory.py",
        "base",
    )
    diagram.arrow([(left + wide, 190), (center + 60, 226)])
    diagram.arrow([(right, 190), (center + wide - 60, 226)])
    diagram.arrow([(center + 60, 226 + high), (left + wide, 350)])
    diagram.arrow([(center + wide - 60, 226 + high), (right, 350)])
    diagram.note(WIDTH / 2, 412, "leaving: comm/gossip/handle.py drains to the highest round entered", "middle")
    diagram.note(WIDTH / 2, 428, "an expired heartbeat: fleet/heartbeat.py, fleet/membership.py", "middle")
    return diagram


if __name__ == "__main__":
    for name, diagram in (("architecture", packages()), ("walk-gradient", walk_gradient()), ("walk-exchange", walk_exchange())):
        (FOLDER / f"{name}.svg").write_text(diagram.svg(), encoding="utf-8")
