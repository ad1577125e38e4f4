"""The baseline: one process per learner and iteration, then a process that averages, as Kaldi's nnet3 scripts train.

Iteration i starts num_jobs(i) processes. Each reads the model from disk, loads and preprocesses its own examples, trains on
them, writes its model and its objective, and ends. A process that averages reads all models and writes the next one. It also
does what the scripts do in addition (source: kaldi, steps/libs/nnet3/train):

    jobs       ramp up linearly from --jobs-initial to --jobs-final
    rate       the effective rate times the number of jobs, which averaging divides by again
    start      the first --best-first iterations take the best job's model instead of the average
    rejection  a job whose objective is more than --reject worse than the best one's does not enter the average

    python benchmarks/job_per_iteration.py run archives/spoken runs/spoken/lstm out --steps 100 --jobs-initial 2 --jobs-final 4

Jobs train on batches of an archive (roundelay pack) in the order of (seed, epoch), dealt in turn: with a constant number of
jobs they see, batch by batch, what learners of `strategy=kstep` see. Times are taken from the launch of a process on: `imports`
until Python can begin, `files` for models, `data` for examples, `train`.
"""

from __future__ import annotations

import sys
import time

LAUNCHED = float(sys.argv.pop()) if len(sys.argv) > 1 and sys.argv[1] in ("job", "average") else 0.0

import argparse  # noqa: E402
import json  # noqa: E402
import subprocess  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True)
    q = commands.add_parser("run", help="train: all iterations")
    q.add_argument("archive", help="data by roundelay pack")
    q.add_argument("model", help="the first model: a folder with model.json and model.safetensors")
    q.add_argument("out", help="a new folder; the trained model will be in OUT/final")
    q.add_argument("--steps", type=int, default=100, help="mini-batches of a job in an iteration")
    q.add_argument("--batch", type=int, default=32)
    q.add_argument("--epochs", type=float, default=1.0)
    q.add_argument("--jobs-initial", type=int, default=1)
    q.add_argument("--jobs-final", type=int, default=2)
    q.add_argument("--rate", type=float, default=0.25, help="effective rate at the beginning")
    q.add_argument("--rate-final", type=float, default=0.0, help="at the end, exponentially (Kaldi's); default: --schedule")
    q.add_argument(
        "--schedule", default="constant", choices=["constant", "cosine", "sqrt2_decay"], help="as in roundelay train"
    )
    q.add_argument("--warmup-epochs", type=float, default=0.0)
    q.add_argument("--momentum", type=float, default=0.0)
    q.add_argument("--clip", type=float, default=0.0)
    q.add_argument("--optimizer", default="sgd", choices=["sgd", "ngsgd"])
    q.add_argument("--best-first", type=int, default=1, help="iterations that take the best job's model")
    q.add_argument("--reject", type=float, default=1.0)
    q.add_argument("--seed", type=int, default=0)
    q.add_argument("--json", action="store_true")
    for name in ("job", "average"):
        commands.add_parser(name).add_argument("order")
    args = p.parse_args()
    if args.command == "run":
        results = run(args)
        print(json.dumps(results) if args.json else "\n".join(f"{key}: {value}" for key, value in results.items()))
        return 0
    order = json.loads(Path(args.order).read_text())
    return job(order) if args.command == "job" else average(order)


# -- the script --------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All iterations, one after another."""
    import shutil

    from roundelay.data.archive import Archive

    out = Path(args.out)
    out.mkdir(parents=True)
    shutil.copytree(args.model, out / "0")
    samples = len(Archive(args.archive))
    total, position, iteration = round(args.epochs * samples), 0, 0
    spent = dict.fromkeys(("imports", "files", "data", "train"), 0.0)
    began = time.perf_counter()
    job_seconds = 0.0
    while position < total:
        jobs = round(args.jobs_initial + (args.jobs_final - args.jobs_initial) * position / total)
        model, here = out / str(iteration), out / f"jobs-{iteration}"
        here.mkdir()
        started = time.perf_counter()
        orders = [
            {
                **vars(args), "model": str(model), "samples": samples, "total": total, "position": position, "jobs": jobs,
                "job": j, "out": str(here / str(j)), "optimizer": args.optimizer,
            }
            for j in range(jobs)
        ]  # fmt: skip
        launch("job", here, orders)
        notes = [json.loads((here / str(j) / "note.json").read_text()) for j in range(jobs)]
        means = {
            "iteration": iteration, "inputs": [str(here / str(j)) for j in range(jobs)], "out": str(out / str(iteration + 1)),
            "best": iteration < args.best_first, "reject": args.reject,
        }  # fmt: skip
        launch("average", here, [means])
        averaged = json.loads((out / str(iteration + 1) / "note.json").read_text())
        seconds = time.perf_counter() - started
        job_seconds += seconds * jobs
        for kind in spent:
            spent[kind] += sum(note[kind] for note in notes) / jobs
        for kind in ("imports", "files"):
            spent[kind] += averaged[kind]
        position, iteration = max(note["position"] for note in notes), iteration + 1
        line = f"iteration {iteration}: {jobs} jobs, {position}/{total} samples, objective {averaged['objective']:.4f}"
        print(f"{line}, {seconds:.1f} s{averaged['remark']}", file=sys.stderr, flush=True)
        shutil.rmtree(here)
        shutil.rmtree(model)
    seconds = time.perf_counter() - began
    (out / str(iteration)).rename(out / "final")
    return {
        "seconds": seconds, "iterations": iteration, "training_share": spent["train"] / seconds,
        **{f"{kind}_s": value for kind, value in spent.items()}, "rest_s": seconds - sum(spent.values()),
    }  # fmt: skip


def launch(what: str, folder: Path, orders: list[dict[str, Any]]) -> None:
    """Starts processes side by side and waits for all of them."""
    started = []
    for number, order in enumerate(orders):
        file = folder / f"{what}-{number}.json"
        file.write_text(json.dumps(order))
        started.append(subprocess.Popen([sys.executable, __file__, what, str(file), str(time.time())]))
    codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit(f"a process ({what}) ended with exit code {max(codes)}")


# -- one job -----------------------------------------------------------------------------------------------------------


def job(order: dict[str, Any]) -> int:
    import torch

    from roundelay.data.examples import Examples
    from roundelay.engine.sharding import ShardPlan, StaticSharding
    from roundelay.optim.lr_schedule import LrSchedule
    from roundelay.speech.nnet.lstm import AcousticModel

    if order["optimizer"] == "ngsgd":  # no job pays for what it does not use
        from roundelay.optim.ngsgd import NGSGD

    torch.set_num_threads(1)
    torch.manual_seed(order["seed"] * 1_000_003 + order["job"])
    note = {"imports": time.time() - LAUNCHED}
    began = time.perf_counter()
    model = AcousticModel.load(Path(order["model"])).train()
    note["files"], began = time.perf_counter() - began, time.perf_counter()

    jobs, batch = order["jobs"], order["batch"]
    examples = Examples(order["archive"], order["seed"])
    dealt = ShardPlan(
        order["samples"], order["total"], [batch] * jobs, order["job"], [order["job"]], range(jobs), order["position"]
    )
    loaded, position = [], order["position"]
    for claim in StaticSharding(dealt):
        data = examples.batch(claim.epoch, claim.start, claim.stop) if claim.stop > claim.start else None
        tensors = None if data is None else (torch.from_numpy(data.x), torch.from_numpy(data.y))
        loaded.append((claim.step_info.position, tensors))
        position = claim.span[1]
        if len(loaded) == order["steps"]:
            break
    note["data"], began = time.perf_counter() - began, time.perf_counter()

    factor = LrSchedule(order["schedule"], order["samples"], order["total"], order["warmup_epochs"])
    parameters = list(model.parameters())
    velocity = [torch.zeros_like(p) for p in parameters] if order["momentum"] else None
    natural = NGSGD(parameters, momentum=order["momentum"]).watch(model) if order["optimizer"] == "ngsgd" else None
    losses = []
    for at, tensors in loaded:
        if tensors is None:
            continue
        rate = rate_at(order, at, factor(at))
        x, y = tensors
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        model.zero_grad(set_to_none=True)
        loss.backward()
        losses.append(float(loss.detach()))
        if order["clip"]:
            torch.nn.utils.clip_grad_norm_(parameters, order["clip"])
        if natural is not None:
            natural.param_groups[0]["lr"] = rate
            natural.step()
            continue
        with torch.no_grad():
            for number, p in enumerate(parameters):
                assert p.grad is not None
                u = p.grad if velocity is None else velocity[number].mul_(order["momentum"]).add_(p.grad)
                p.add_(u, alpha=-rate)
    note["train"], began = time.perf_counter() - began, time.perf_counter()
    model.save(Path(order["out"]))
    note["files"] += time.perf_counter() - began
    note |= {"objective": sum(losses) / max(len(losses), 1), "steps": len(losses), "position": position}
    (Path(order["out"]) / "note.json").write_text(json.dumps(note))
    return 0


def rate_at(order: dict[str, Any], position: int, factor: float) -> float:
    """The effective rate times the number of jobs."""
    if order["rate_final"]:
        factor = (order["rate_final"] / order["rate"]) ** (order["position"] / order["total"])
    return order["jobs"] * order["rate"] * factor


# -- averaging ---------------------------------------------------------------------------------------------------------


def average(order: dict[str, Any]) -> int:
    import torch
    from safetensors.torch import load_file, save_file

    note: dict[str, Any] = {"imports": time.time() - LAUNCHED}
    began = time.perf_counter()
    folders = [Path(folder) for folder in order["inputs"]]
    job_notes = [json.loads((folder / "note.json").read_text()) for folder in folders]
    trained = {
        f: t["objective"] for f, t in zip(folders, job_notes, strict=True) if t["steps"] and t["objective"] == t["objective"]
    }
    if not trained:
        raise SystemExit("every job has diverged")
    best = min(trained, key=lambda folder: trained[folder])
    accepted = [best] if order["best"] else [f for f in trained if trained[f] <= trained[best] + order["reject"]]
    dropped = len(folders) - len(accepted)
    remark = ", best job taken" if order["best"] else f", {dropped} models rejected" if dropped else ""
    models = [load_file(str(folder / "model.safetensors")) for folder in accepted]
    mean = {name: torch.stack([m[name] for m in models]).mean(0) for name in models[0]}
    out = Path(order["out"])
    out.mkdir()
    save_file(mean, str(out / "model.safetensors"))
    (out / "model.json").write_text((best / "model.json").read_text())
    note |= {"files": time.perf_counter() - began, "remark": remark, "objective": trained[best]}
    (out / "note.json").write_text(json.dumps(note))
    return 0


if __name__ == "__main__":
    sys.exit(main())
