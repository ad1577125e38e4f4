"""Speed of the stages of the speech pipeline on one core, on the data of a finished run.

features    log-mels with deltas, normalized, written to disk         seconds of audio per CPU second
synthesis   synthesis and perturbation (needs the extra 'synth')      seconds of audio per CPU second
align       a Viterbi pass of training: align, gather statistics      frames per CPU second, monophones and tied states
decode      network and search at the recipe's beam and scale         seconds of audio per CPU second, every system

CPU seconds of this process and its children, so that other load on the machine matters little.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.common import parser, run_main
from roundelay.recipes.run_layout import RunLayout, aligned_run, scale_file
from roundelay.recipes.speaker_adaptation import adapt_unsupervised, stream_for
from roundelay.recipes.systems import chosen_scale, open_system
from roundelay.speech.corpora.kaldi_dir import read_data_dir
from roundelay.speech.corpora.utterance import Corpus
from roundelay.speech.decode import DecodeOptions, Decoder
from roundelay.speech.features.extract import FeatureOptions, extract
from roundelay.speech.features.feature_store import FeatureStore
from roundelay.speech.graph.hclg import load_graph
from roundelay.speech.hmm.em_workers import EmWorkers
from roundelay.speech.hmm.lexicon import Lexicon
from roundelay.speech.hmm.model import AlignmentModel

UTTERANCES = 150
FRAMES_PER_S = 100


def main(argv: Sequence[str]) -> int:
    p = parser("speech_speed", __doc__, "python -m benchmarks.speech_speed runs/spoken --json")
    p.add_argument("run", metavar="RUN", help="a finished run directory of a recipe")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--utterances", type=int, default=UTTERANCES, help="of the first test set")
    args = p.parse_args(argv)
    report = {"results": measure(RunLayout(aligned_run(args.run)), args.utterances, args.repeats), "cores_used": 1}
    print(json.dumps(report) if args.json else table(report))
    return 0


def cpu_seconds() -> float:
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def measure(run: RunLayout, count: int, repeats: int) -> list[dict[str, Any]]:
    name = run.test_sets()[0]
    whole, store = read_data_dir(run.data_set(name)), FeatureStore.open(run.features(name))
    chosen = {u.id for u in whole.utterances[:: max(1, len(whole.utterances) // count)]} & set(store.ids)
    corpus = whole.subset(lambda u: u.id in chosen)
    frames = sum(store.frames(u.id) for u in corpus.utterances)
    audio_s = frames / FRAMES_PER_S
    jobs: dict[tuple[str, str], Callable[[], None]] = {("features", ""): lambda: _features(corpus, store)}
    for system in ("mono", "tri"):
        if run.system(system).is_dir():
            jobs["align", system] = _alignment_pass(run, system, corpus, store)
    for system in ("mono", "tri", "lstm"):
        if scale_file(run.decode(system)).exists():
            jobs["decode", system] = _decoding(run, system, corpus, store)
    results = []
    for (stage, system), job in jobs.items():
        rates = []
        for number in range(repeats + 1):
            began = cpu_seconds()
            job()
            if number:  # the first one compiles and warms up
                rates.append((frames if stage == "align" else audio_s) / max(cpu_seconds() - began, 1e-9))
        results.append(row(stage, system, rates))
    if find_spec("espeakng_loader") is not None:
        results.append(row("synthesis", "", [_synthesis(number) for number in range(repeats)]))
    return results


def row(stage: str, system: str, rates: Sequence[float]) -> dict[str, Any]:
    unit = "frames_per_cpu_s" if stage == "align" else "times_real_time"
    return {
        "stage": stage, "system": system, "unit": unit, "rate": round(statistics.median(rates), 1),
        "range": [round(min(rates), 1), round(max(rates), 1)],
    }  # fmt: skip


def _features(corpus: Corpus, store: FeatureStore) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = FeatureOptions(**store.options)
        extract(corpus, Path(folder) / "features", options, jobs=1, resample=True, progress="none")


def _alignment_pass(run: RunLayout, system: str, corpus: Corpus, store: FeatureStore) -> Callable[[], None]:
    model, lexicon = AlignmentModel.load(run.system(system)), Lexicon.read(run.lexicon)
    crew = EmWorkers([(u.id, u.words) for u in corpus.utterances], store, lexicon, 1)

    def job() -> None:
        crew.call("accumulate", model, True)

    return job


def _decoding(run: RunLayout, system: str, corpus: Corpus, store: FeatureStore) -> Callable[[], None]:
    scale = chosen_scale(run, system)
    model, stream = (
        open_system(run, system),
        stream_for(run, system, store, partial(adapt_unsupervised, run, store, progress="none")),
    )
    decoder = Decoder(load_graph(run.graph(system)), replace(DecodeOptions(), acoustic_scale=scale))

    def job() -> None:
        for utterance in corpus.utterances:
            decoder.decode(model.scores(stream, utterance.id))

    return job


def _synthesis(seed: int) -> float:
    from roundelay.speech.synth.corpus import SynthOptions, synthesize

    with tempfile.TemporaryDirectory() as folder:
        few = SynthOptions(
            seed=seed, train_speakers=8, train_utterances=80, dev_speakers=2, dev_utterances=10, test_speakers=2,
            test_utterances=10, lm_sentences=500,
        )  # fmt: skip
        began = cpu_seconds()
        system = synthesize(Path(folder) / "corpus", few, jobs=1, progress="none")
        spent = cpu_seconds() - began
        ids = [
            line.split() for part in system for line in (Path(folder) / "corpus" / part / "utt2dur").read_text().splitlines()
        ]
        return sum(float(seconds) for _, seconds in ids) / spent


def table(report: dict[str, Any]) -> str:
    lines = ["| stage | system | rate | range | unit |", "|---|---|---|---|---|"]
    for r in report["results"]:
        lines.append(
            f"| {r['stage']} | {r['system']} | {r['rate']:,.0f} | {r['range'][0]:,.0f} - {r['range'][1]:,.0f} "
            f"| {r['unit'].replace('_', ' ')} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
