"""Word error rate of every strategy against `single`, with equal samples on the same speech.

Takes a finished run of a recipe and trains its network again with each strategy: the same features, alignments, windows,
global batch and rate. Each network is decoded with the graph of the run, its acoustic scale chosen on dev, and compared with
`single` of the same seed by utterance; intervals come from resampling the speakers of the test set.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import log, parser, run_main
from roundelay.errors import UsageError, did_you_mean
from roundelay.recipes import config as recipe_config
from roundelay.recipes.decode_stage import decode_system
from roundelay.recipes.network_stage import finish_network, train_network
from roundelay.recipes.pipeline_context import PipelineContext
from roundelay.recipes.run_layout import RunLayout, aligned_run, hypothesis_file
from roundelay.speech.score import paired, read_text, score

CONTESTANTS: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single", "learners": 1},
    "sync": {"strategy": "sync"},
    "kstep": {"strategy": "kstep"},
    "bmuf": {"strategy": "bmuf", "strategy_options": {"K": 4}},
    "dpsgd": {"strategy": "dpsgd"},
    "adpsgd": {"strategy": "adpsgd", "topology": "ring"},
    "adpsgd_random": {"strategy": "adpsgd", "topology": "random_ring"},
    "delay_by_one": {"strategy": "delay_by_one"},
    "hierarchical": {"strategy": "hierarchical(adpsgd)", "simulate_nodes": 2},
    "asgd": {"strategy": "asgd"},
}
SEVERAL_SEEDS = ("single", "adpsgd")


def main(argv: Sequence[str]) -> int:
    p = parser(
        "speech",
        __doc__,
        "python -m benchmarks.speech spoken runs/spoken --json\n"
        "  python -m benchmarks.speech spoken runs/spoken network.hidden=96 train.epochs=3 --strategies adpsgd,sync",
    )
    p.add_argument("recipe", metavar="RECIPE")
    p.add_argument("run", metavar="RUN", help="its finished run directory")
    p.add_argument("overrides", nargs="*", metavar="key=value", help="section.key=value of the recipe: another network, say")
    p.add_argument("--learners", type=int, default=4)
    p.add_argument("--seeds", type=int, default=3, help="for single and adpsgd; all other strategies run the first seed")
    p.add_argument("--strategies", default=",".join(CONTESTANTS), help=f"any of {', '.join(CONTESTANTS)}")
    p.add_argument("--epochs", type=float, default=0.0, help="default: the recipe's")
    p.add_argument("--jobs", type=int, default=2)
    args = p.parse_intermixed_args(argv)
    names = [name.strip() for name in args.strategies.split(",")]
    for name in names:
        if name not in CONTESTANTS:
            raise UsageError(f"'{name}' is not a contestant", where="--strategies", hint=did_you_mean(name, CONTESTANTS))
    run, recipe = aligned_run(args.run), recipe_config.load(args.recipe, args.overrides)
    work = PipelineContext(recipe, run, args.jobs, progress="plain")
    report = compare(work, ["single", *(n for n in names if n != "single")], args.learners, args.seeds, args.epochs)
    print(json.dumps(report) if args.json else table(report))
    return 0


def compare(work: PipelineContext, names: Sequence[str], learners: int, seeds: int, epochs: float) -> dict[str, Any]:
    """Train what is not cached, then score all strategies."""
    hypotheses: dict[tuple[str, int], Path] = {}
    for seed in range(seeds):
        for name in names:
            if seed == 0 or name in SEVERAL_SEEDS:
                hypotheses[name, seed] = one(work, name, learners, seed, epochs)
    rows = []
    for set_name in work.sets():
        corpus = work.corpus(set_name)
        for name in names:
            rows.append(row(corpus, set_name, name, {s: f for (n, s), f in hypotheses.items() if n == name}, hypotheses))
    return {"results": rows, "learners": learners, "train": work.recipe.train}


def one(work: PipelineContext, name: str, learners: int, seed: int, epochs: float) -> Path:
    """Train and decode one network, unless the result is cached; return the folder of its hypotheses."""
    choice = dict(CONTESTANTS[name])
    count = choice.setdefault("learners", learners)
    per_learner = int(work.recipe.train.get("batch", 64)) * int(work.recipe.train.get("learners", 1)) // count
    settings = {**work.recipe.train, **choice, "batch": per_learner, "eval_at_checkpoint": False}
    if epochs:
        settings["epochs"] = epochs
    folder = work.run / "strategies" / f"{name}-{learners}-{seed}-{recipe_config.settings_hash(settings, work.recipe.network)}"
    done = folder / "hypotheses"
    if (done / "complete").exists():
        log(f"{name}, seed {seed}: done before")
        return done
    log(f"{name}, seed {seed}: {count} learners with batches of {per_learner}")
    trained = train_network(work, folder / "network", settings, work.layout.alignments(), seed)
    finish_network(work, trained, folder / "lstm")
    decode_system(work, RunLayout(folder), "lstm", done)
    (done / "complete").write_text("")
    return done


def row(
    corpus: Any, set_name: str, name: str, mine: dict[int, Path], all_of_them: dict[tuple[str, int], Path]
) -> dict[str, Any]:
    """Return the word error rate of a strategy and its difference to single with the same seeds."""
    refs = {u.id: u.words for u in corpus.utterances}
    speakers = {u.id: u.speaker for u in corpus.utterances}
    ours = [read_text(hypothesis_file(folder, set_name)) for folder in mine.values()]
    singles = [read_text(hypothesis_file(all_of_them["single", seed], set_name)) for seed in mine]
    rates = [score(refs, hyps, speakers).wer for hyps in ours]
    pair = paired(refs, singles, ours, speakers)
    return {
        "contestant": name, "set": set_name, "seeds": len(mine), "wer": round(statistics.mean(rates), 3),
        "range": [round(min(rates), 3), round(max(rates), 3)],
        "difference": round(pair.difference, 3), "difference_range": [round(pair.low, 3), round(pair.high, 3)],
        "speakers": len(set(speakers.values())),
    }  # fmt: skip


def table(report: dict[str, Any]) -> str:
    lines = ["| strategy | seeds | WER % | range of seeds | minus single | 95 % interval |", "|---|---|---|---|---|---|"]
    for r in report["results"]:
        lines.append(
            f"| {r['contestant']} | {r['seeds']} | {r['wer']:.2f} | {r['range'][0]:.2f} - {r['range'][1]:.2f} "
            f"| {r['difference']:+.2f} | {r['difference_range'][0]:+.2f} to {r['difference_range'][1]:+.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
