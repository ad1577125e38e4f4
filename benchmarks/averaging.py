"""How often to average, and what it costs in three systems.

job         one process per learner and iteration, then one that averages (benchmarks/job_per_iteration.py, as Kaldi trains)
persistent  learners that live for the whole run (strategy kstep), data prepared when it is needed
overlap     the same with loaders in the background

All train the network of a finished recipe run from the same archive, on the same batches in the same order, with the same
arithmetic: equal rates, plain averages, optimizer state reset at every average. So models differ by rounding only, and
systems by time only. `seconds` is the training itself; startup_s is the start of persistent learners, once per run. Results
are cached in RUN/averaging.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import roundelay
from benchmarks.common import Points, chart, log, parser, run_main, write_page
from roundelay import config
from roundelay.errors import RoundelayError, UsageError
from roundelay.recipes import config as recipe_config
from roundelay.recipes.decode_stage import decode_system
from roundelay.recipes.network_stage import training_config
from roundelay.recipes.pipeline_context import PipelineContext, recreate_dir
from roundelay.recipes.run_layout import RunLayout, aligned_run, hypothesis_file
from roundelay.recipes.systems import save_network
from roundelay.speech.hmm.align import Alignments
from roundelay.speech.nnet.lstm import AcousticModel
from roundelay.speech.score import read_text, score

SYSTEMS = ("job", "persistent", "overlap")
FRAMES = (3_000, 9_000, 27_000, 81_000, 243_000)
BASELINE = Path(roundelay.__file__).parents[2] / "benchmarks" / "job_per_iteration.py"
PAPER = {"training_share": 0.45, "gain": 0.549}


@dataclass(frozen=True)
class AveragingCase:
    """One training."""

    system: str
    frames: int
    seed: int = 0
    repeat: int = 0
    optimizer: str = "sgd"

    @property
    def name(self) -> str:
        return f"{self.system}-{self.frames}-{self.optimizer}-seed{self.seed}-{self.repeat}"


def main(argv: Sequence[str]) -> int:
    p = parser(
        "averaging",
        __doc__,
        "python -m benchmarks.averaging spoken runs/spoken --json\n"
        "  python -m benchmarks.averaging spoken runs/spoken network.hidden=96 --repeats 3 --no-wer\n"
        "  python -m benchmarks.averaging spoken runs/spoken --systems overlap --optimizers sgd,ngsgd --seeds 3",
    )
    p.add_argument("recipe", metavar="RECIPE")
    p.add_argument("run", metavar="RUN", help="its finished run directory")
    p.add_argument("overrides", nargs="*", metavar="key=value", help="section.key=value of the recipe: another network, say")
    p.add_argument("--frames", default=",".join(map(str, FRAMES)), help="frames of a learner between averages")
    p.add_argument("--systems", default=",".join(SYSTEMS))
    p.add_argument("--optimizers", default="sgd", help="sgd, ngsgd; all but the first run in the last system only")
    p.add_argument("--learners", type=int, default=2)
    p.add_argument("--epochs", type=float, default=1.0)
    p.add_argument("--lr", type=float, default=0.0, help="default: the recipe's, divided by 1 - its momentum")
    p.add_argument("--repeats", type=int, default=1, help="of every timing, interleaved")
    p.add_argument("--seeds", type=int, default=1, help="more: at the smallest and largest number of frames, last system only")
    p.add_argument("--no-wer", action="store_true", help="do not decode")
    p.add_argument("--quick", action="store_true", help="three numbers of frames, a fifth of an epoch, no decoding")
    p.add_argument("--jobs", type=int, default=2, help="processes for packing and decoding")
    p.add_argument("--page", default="", metavar="FILE", help="curves; default RUN/averaging/averaging.html")
    p.add_argument("--baseline", metavar="FILE", help="the script job_per_iteration.py; default: the one of the checkout")
    args = p.parse_intermixed_args(argv)
    args.baseline = args.baseline or str(BASELINE)
    if args.quick:
        args.frames, args.epochs, args.no_wer = "3000,9000,27000", 0.2, True
    bench = AveragingBench(args)
    report = bench.run()
    print(json.dumps(report) if args.json else table(report))
    return 0


class AveragingBench:
    """All cases of one command line."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.systems = [s.strip() for s in args.systems.split(",")]
        self.frames = sorted(int(f) for f in args.frames.split(","))
        for system in self.systems:
            if system not in SYSTEMS:
                raise UsageError(f"there is no system '{system}'", where="--systems", hint=f"choose from {', '.join(SYSTEMS)}")
        if "job" in self.systems and not Path(args.baseline).exists():
            raise UsageError(
                "the baseline's script is not there", where=args.baseline, hint="run in a checkout, or give --baseline"
            )
        recipe = recipe_config.load(args.recipe, args.overrides)
        recipe = replace(recipe, network=replace(recipe.network, packed=True))
        self.work = PipelineContext(recipe, aligned_run(args.run), args.jobs, progress="plain")
        self.folder = self.work.run / "averaging"
        self.folder.mkdir(exist_ok=True)
        train = recipe.train
        self.batch = int(train.get("batch", 64))
        self.lr = args.lr or float(train.get("lr", 0.1)) / (1 - float(train.get("momentum", 0.9)))
        self.schedule: dict[str, Any] = {k: train[k] for k in ("schedule", "warmup_epochs", "max_grad_norm") if k in train}
        if "warmup_epochs" in self.schedule:  # keeps its share of the run
            self.schedule["warmup_epochs"] *= args.epochs / float(train.get("epochs", 1.0))
        os.environ["OMP_NUM_THREADS"] = "1"

    def cases(self) -> list[AveragingCase]:
        """Contestants of one setting run one after another, so that a busy hour falls on all of them."""
        first, *others = [o.strip() for o in self.args.optimizers.split(",")]
        last = self.systems[-1]
        results = [
            AveragingCase(system, frames, 0, repeat, first)
            for repeat in range(self.args.repeats)
            for frames in self.frames
            for system in self.systems
        ]
        results += [AveragingCase(last, frames, 0, 0, other) for other in others for frames in self.frames]
        ends = sorted({self.frames[0], self.frames[-1]})
        for seed in range(1, self.args.seeds):
            results += [AveragingCase(last, frames, seed, 0, o) for frames in ends for o in (first, *others)]
        return results

    def run(self) -> dict[str, Any]:
        rows = [self.one(case) for case in self.cases()]
        report = {
            "results": summed(rows), "runs": rows, "learners": self.args.learners, "epochs": self.args.epochs, "lr": self.lr,
            "batch": self.batch, "gains": gains(rows), "paper": PAPER,
        }  # fmt: skip
        target = Path(self.args.page) if self.args.page else self.folder / "averaging.html"
        draw(report, target)
        log(f"curves: {target}")
        (self.folder / "averaging.json").write_text(json.dumps(report, indent=1))
        return report

    def one(self, case: AveragingCase) -> dict[str, Any]:
        args = self.args
        settings = {
            "learners": args.learners,
            "epochs": args.epochs,
            "lr": self.lr,
            "batch": self.batch,
            "wer": not args.no_wer,
        }
        mark = recipe_config.settings_hash(settings, self.schedule, self.work.recipe.network)
        folder = self.folder / f"{case.name}-{mark}"
        done = folder / "row.json"
        if done.exists():
            log(f"{case.name}: done before")
            return dict(json.loads(done.read_text()))
        recreate_dir(folder)
        engine = training_config(self.work, self.engine(case), self.work.layout.alignments(), case.seed)
        (folder / "task.toml").write_text(config.dumps(engine))
        task = config.build_task(config.load(folder / "task.toml"))
        steps = max(1, round(case.frames / (task.frames_per_sample * self.batch)))
        log(f"{case.name}: {steps} steps between averages")
        began = time.monotonic()
        row = (self.jobs if case.system == "job" else self.persistent)(case, folder, task, steps)
        row["wall_s"] = round(time.monotonic() - began, 3)
        row |= self.evaluate(folder, task)
        row = {
            "system": case.system, "frames_per_averaging": case.frames, "steps_per_averaging": steps, "seed": case.seed,
            "repeat": case.repeat, "optimizer": case.optimizer, **row,
        }  # fmt: skip
        done.write_text(json.dumps(row))
        share = f"training {row['training_share']:.3f}"
        log(f"{case.name}: {row['seconds']:.1f} s, {share}, logprob {row['logprob']:.4f}, WER {row['wer']}")
        return row

    def engine(self, case: AveragingCase) -> dict[str, Any]:
        return {
            "strategy": "kstep", "learners": self.args.learners, "epochs": self.args.epochs, "batch": self.batch, "lr": self.lr,
            "momentum": 0.0, "optimizer": case.optimizer, "num_workers": 0 if case.system == "persistent" else 2,
            **self.schedule, "checkpoint_every_epochs": 1e6, "eval_at_checkpoint": False, "progress": "none",
        }  # fmt: skip

    def first_model(self, task: Any, seed: int) -> AcousticModel:
        torch.manual_seed(seed)
        model = task.build()
        assert isinstance(model, AcousticModel)
        return model

    def jobs(self, case: AveragingCase, folder: Path, task: Any, steps: int) -> dict[str, Any]:
        self.first_model(task, case.seed).save(folder / "first")
        options = {
            "steps": steps, "batch": self.batch, "epochs": self.args.epochs, "jobs-initial": self.args.learners,
            "jobs-final": self.args.learners, "rate": self.lr / self.args.learners, "best-first": 0, "seed": case.seed,
            "optimizer": case.optimizer, "schedule": self.schedule.get("schedule", "constant"),
            "warmup-epochs": self.schedule.get("warmup_epochs", 0.0), "clip": self.schedule.get("max_grad_norm", 0.0),
        }  # fmt: skip
        archive = task.examples.archive.folder
        command = [
            sys.executable,
            self.args.baseline,
            "run",
            str(archive),
            str(folder / "first"),
            str(folder / "jobs"),
            "--json",
        ]
        results = output([*command, *(part for k, v in options.items() for part in (f"--{k}", str(v)))], folder)
        (folder / "jobs" / "final" / "model.safetensors").rename(folder / "model.safetensors")
        return {**{k: round(v, 4) for k, v in results.items()}, "startup_s": 0.0}

    def persistent(self, case: AveragingCase, folder: Path, task: Any, steps: int) -> dict[str, Any]:
        kstep = [f"strategy_options.K={steps}", 'strategy_options.state="reset"']
        run = folder / "run"
        command = [
            sys.executable,
            "-m",
            "roundelay",
            "train",
            str(folder / "task.toml"),
            *kstep,
            f"run={json.dumps(str(run))}",
            "--json",
        ]
        began = time.perf_counter()
        results = output(command, folder)
        wall = time.perf_counter() - began
        ranks = list(results["ranks"].values()) or [results]
        seconds = max(r["elapsed_s"] for r in ranks)
        spent = {k: statistics.mean(r.get(f"{k}_s", 0.0) for r in ranks) for k in ("data", "loader", "comm", "save")}
        shares = [1 - sum(r.get(f"{k}_s", 0.0) for k in ("data", "comm", "save")) / r["elapsed_s"] for r in ranks]
        (run / "model.safetensors").rename(folder / "model.safetensors")
        return {
            "seconds": round(seconds, 4), "training_share": statistics.mean(shares), "startup_s": round(wall - seconds, 4),
            **{f"{k}_s": round(v, 4) for k, v in spent.items()},
        }  # fmt: skip

    def evaluate(self, folder: Path, task: Any) -> dict[str, Any]:
        """Log-probability per frame and word errors; a model that was decoded before is not decoded again."""
        model = AcousticModel(task.shape)
        weights = folder / "model.safetensors"
        model.load_state_dict(load_file(str(weights)))
        with torch.no_grad():
            total, frames = task.evaluate(model.eval(), 0, 1)["logprob"]
        results: dict[str, Any] = {"logprob": total / frames, "wer": None}
        if self.args.no_wer:
            return results
        cache = self.folder / "wer.json"
        rates: dict[str, float] = json.loads(cache.read_text()) if cache.exists() else {}
        digest = hashlib.sha256(weights.read_bytes()).hexdigest()
        if digest not in rates:
            save_network(recreate_dir(folder / "lstm"), model, self.counts(), {})
            decode_system(self.work, RunLayout(folder), "lstm", folder / "hypotheses")
            name = self.work.sets()[0]
            refs = {u.id: u.words for u in self.work.corpus(name).utterances}
            rates[digest] = round(score(refs, read_text(hypothesis_file(folder / "hypotheses", name))).wer, 3)
            cache.write_text(json.dumps(rates))
        return results | {"wer": rates[digest]}

    def counts(self) -> Any:
        return Alignments.open(self.work.layout.alignments() / "train").counts()


def output(command: list[str], folder: Path) -> dict[str, Any]:
    """What a command printed as JSON."""
    with open(folder / "log.txt", "w") as log:
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
    if ended.returncode != 0:
        last = (folder / "log.txt").read_text().splitlines()[-1:]
        raise RoundelayError(
            f"a training ended with exit code {ended.returncode}: {''.join(last)}", where=str(folder / "log.txt")
        )
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def summed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for every setting: medians over repeats and seeds, with ranges."""
    results = []
    for key in dict.fromkeys((r["optimizer"], r["frames_per_averaging"], r["system"]) for r in rows):
        mine = [r for r in rows if (r["optimizer"], r["frames_per_averaging"], r["system"]) == key]
        row: dict[str, Any] = {"system": key[2], "frames_per_averaging": key[1], "optimizer": key[0], "runs": len(mine)}
        for name in ("seconds", "training_share", "startup_s", "logprob", "wer"):
            values = [r[name] for r in mine if r[name] is not None]
            row[name] = round(statistics.median(values), 5) if values else None
            row[f"{name}_range"] = [min(values), max(values)] if values else None
        row |= {
            k: round(statistics.median(r[k] for r in mine), 4)
            for k in ("imports_s", "files_s", "data_s", "loader_s", "comm_s", "rest_s")
            if all(k in r for r in mine)
        }
        results.append(row)
    return results


def gains(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What overlap saves of the job system's time, with its imports and without them."""
    results = {(r["system"], r["frames_per_averaging"]): r for r in summed(rows) if r["optimizer"] == rows[0]["optimizer"]}
    gain_rows: list[dict[str, Any]] = []
    for frames in sorted({f for _, f in results}):
        job, ours = results.get(("job", frames)), results.get(("overlap", frames))
        if job is None or ours is None:
            continue
        gain_rows.append(
            {
                "frames_per_averaging": frames, "job_training_share": job["training_share"],
                "overlap_training_share": ours["training_share"], "gain": round(1 - ours["seconds"] / job["seconds"], 4),
                "gain_without_imports": round(1 - ours["seconds"] / (job["seconds"] - job["imports_s"]), 4),
                "job_overhead": {k: round(job[f"{k}_s"] / job["seconds"], 4) for k in ("imports", "files", "data", "rest")},
            }
        )  # fmt: skip
    for row in sorted(gain_rows, key=lambda r: abs(r["job_training_share"] - PAPER["training_share"]))[:1]:
        row["nearest_to_the_paper"] = True
    return gain_rows


def draw(report: dict[str, Any], path: Path) -> None:
    names = {(r["system"], r["optimizer"]) for r in report["results"]}
    several = len({o for _, o in names}) > 1

    def points(value: str) -> dict[str, Points]:
        return {
            f"{system}, {optimizer}" if several else system: [
                (r["frames_per_averaging"], r[value] if r[value] is not None else float("nan"))
                for r in report["results"]
                if (r["system"], r["optimizer"]) == (system, optimizer)
            ]
            for system, optimizer in sorted(names)
        }

    across = "frames of a learner between averages"
    shown: list[tuple[str, str, str, bool]] = [
        ("Seconds for equal samples", "s", "seconds", True),
        ("Share of the time that is training", "", "training_share", True),
        ("Validation log-probability per frame", "", "logprob", False),
        ("Word error rate", "%", "wer", False),
    ]
    charts = [chart(title, across, unit or title, points(value), zero=zero) for title, unit, value, zero in shown]
    about = f"{report['learners']} learners, batches of {report['batch']}, {report['epochs']:g} epochs, rate {report['lr']:g}."
    write_page(path, "Averaging: how often, and what it costs", about, charts)


def table(report: dict[str, Any]) -> str:
    lines = ["| frames | system | optimizer | seconds | training share | logprob | WER % |", "|---|---|---|---|---|---|---|"]
    for r in report["results"]:
        wer = "" if r["wer"] is None else f"{r['wer']:.2f}"
        lines.append(
            f"| {r['frames_per_averaging']:,} | {r['system']} | {r['optimizer']} | {r['seconds']:.1f} "
            f"| {r['training_share']:.3f} | {r['logprob']:.4f} | {wer} |"
        )
    lines += [
        "",
        "| frames | gain | without imports | job trains | imports | files | data | rest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for g in report["gains"]:
        parts = " | ".join(f"{100 * g['job_overhead'][k]:.0f} %" for k in ("imports", "files", "data", "rest"))
        lines.append(
            f"| {g['frames_per_averaging']:,} | {100 * g['gain']:.1f} % | {100 * g['gain_without_imports']:.1f} % "
            f"| {100 * g['job_training_share']:.0f} % | {parts} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
