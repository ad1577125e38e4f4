"""A finished run at work: aligning, recognizing and exporting, with nothing but the run directory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from roundelay import config
from roundelay.errors import DataError
from roundelay.recipes.speaker_adaptation import adapt_supervised, adapt_unsupervised, stream_for
from roundelay.recipes.stages import TASK_FILE
from roundelay.recipes.systems import System, chosen_scale, graph_of, open_system
from roundelay.speech.corpora.kaldi_dir import read_data_dir
from roundelay.speech.corpora.utterance import Corpus
from roundelay.speech.decode import DecodeOptions, Decoder, Hypothesis, decode_all
from roundelay.speech.features.extract import FeatureOptions, extract
from roundelay.speech.features.feature_store import FeatureStore, Stream, from_spec
from roundelay.speech.graph.hclg import load_graph
from roundelay.speech.hmm.align import align_all
from roundelay.speech.hmm.lexicon import Lexicon
from roundelay.speech.hmm.model import AlignmentModel
from roundelay.speech.nnet import export
from roundelay.speech.nnet.lstm import AcousticModel
from roundelay.speech.score import Score, score


def made_elsewhere(run: Path) -> bool:
    """Whether the features of a run were given to it rather than made from recordings."""
    return not (run / "features").is_dir()


def options_of_run(run: Path) -> FeatureOptions:
    """The features that a run's systems were trained on."""
    if made_elsewhere(run):
        raise DataError(
            "this run was trained on features made elsewhere and cannot make them from recordings",
            where=str(run),
            hint="let the recipe decode, or export --posteriors of features",
        )
    return FeatureOptions(**FeatureStore.open(run / "features" / "train").options)


def features_of(run: Path, corpus: Corpus, folder: Path, jobs: int) -> FeatureStore:
    return extract(corpus, folder, options_of_run(run), jobs=jobs, resample=True)


def describe_features(run: Path) -> dict[str, Any]:
    if made_elsewhere(run):
        return {"streams": config.load(run / "network" / TASK_FILE).settings.task_options["features"]}
    return asdict(options_of_run(run))


def align_data(run: Path, data: Path, out: Path, system: str, jobs: int) -> str:
    """Aligns a data directory; returns a sentence about it."""
    corpus, lexicon = read_data_dir(data), Lexicon.read(run / "data" / "lexicon.txt")
    made = open_system(run, system)
    model = AlignmentModel.load(run / ("tri" if system == "lstm" else system))
    said = {u.id: u.words for u in corpus.utterances}
    with tempfile.TemporaryDirectory() as folder:
        plain = features_of(run, corpus, Path(folder) / "features", jobs)
        store = stream_for(run, system, plain, lambda: adapt_supervised(run, plain, said, jobs=jobs))
        scale = chosen_scale(run, system) if system == "lstm" else 0.0
        scores = (lambda name: scale * made.scores(store, name)) if system == "lstm" else None
        found = align_all(model, store, corpus, lexicon, out, jobs=jobs, progress="auto", loglikes=scores)
    lines = [f"{name} 1 {s / 100:.2f} {(e - s) / 100:.2f} {w}" for name in found.ids for w, s, e in found.words(name)]
    (out / "words.ctm").write_text("".join(f"{line}\n" for line in lines))
    skipped = "".join(f"\n  skipped {name}: {why}" for name, why in found.skipped.items())
    return f"{out}: {len(found.ids)} utterances aligned, {len(lines)} word times in words.ctm{skipped}"


@dataclass
class Recognizer:
    """A system of a run with its graph."""

    run: Path
    name: str
    system: System
    graph: Path
    options: DecodeOptions

    @classmethod
    def open(cls, run: Path, system: str, *, graph: Path | None = None, scale: float = 0.0, beam: float = 0.0) -> Recognizer:
        if not run.is_dir():
            raise DataError("there is no such run directory", where=str(run), hint="train one with: roundelay run spoken")
        options = DecodeOptions(acoustic_scale=scale or chosen_scale(run, system))
        chosen = replace(options, beam=beam) if beam else options
        return cls(run, system, open_system(run, system), graph or run / graph_of(system), chosen)

    def check_lexicon(self, path: Path) -> None:
        """An error if the graph was made with another lexicon."""
        load_graph(self.graph, lexicon=Lexicon.read(path))

    def recognize(
        self, data: Path, *, jobs: int = 1, allow_pipes: bool = False
    ) -> tuple[dict[str, Sequence[str]], Score | None]:
        """Hypotheses by utterance; and their score, where the data directory has transcripts."""
        has_text = (data / "text").is_file()
        corpus = read_data_dir(data, need_text=has_text, allow_pipes=allow_pipes)
        with tempfile.TemporaryDirectory() as folder:
            plain = features_of(self.run, corpus, Path(folder) / "features", jobs)
            store = stream_for(self.run, self.name, plain, lambda: adapt_unsupervised(self.run, plain, jobs=jobs))
            found = decode_all(
                self.graph, lambda name: self.system.scores(store, name), store.ids, self.options, jobs=jobs, progress="auto"
            )
        hyps: dict[str, Sequence[str]] = {u.id: found[u.id].words if u.id in found else () for u in corpus.utterances}
        if not has_text:
            return hyps, None
        refs = {u.id: u.words for u in corpus.utterances}
        return hyps, score(refs, hyps, {u.id: u.speaker for u in corpus.utterances})

    def nbest(self, data: Path, count: int, *, jobs: int = 1, allow_pipes: bool = False) -> dict[str, list[Hypothesis]]:
        """Return at most `count` sentences per utterance, the best first."""
        corpus = read_data_dir(data, need_text=False, allow_pipes=allow_pipes)
        decoder = Decoder(self.graph, self.options)
        with tempfile.TemporaryDirectory() as folder:
            plain = features_of(self.run, corpus, Path(folder) / "features", jobs)
            store = stream_for(self.run, self.name, plain, lambda: adapt_unsupervised(self.run, plain, jobs=jobs))
            return {name: decoder.nbest(self.system.scores(store, name), count, name) for name in store.ids}


def export_run(run: Path, out: Path, *, onnx: bool, posteriors: str, jobs: int) -> list[str]:
    """Writes what was asked for; returns a line about each."""
    model = AcousticModel.load(run / "lstm")
    facts = export.read_facts(run / "lstm" / "model.json")
    result = run / "result.json"
    for row in json.loads(result.read_text())["systems"] if result.exists() else []:
        if row["name"] == "lstm":
            facts[f"word error rate, {row['set']}"] = f"{row['wer']:.2f} % ({row['low']:.2f} - {row['high']:.2f})"
    model.save(out, facts)
    (out / "priors.safetensors").write_bytes((run / "lstm" / "priors.safetensors").read_bytes())
    (out / "features.json").write_text(json.dumps(describe_features(run), indent=1))
    (out / "README.md").write_text(export.model_card(model, f"Acoustic model of {run.resolve().name}", facts))
    lines = [f"{out}: model.safetensors, model.json, priors.safetensors, features.json, README.md"]
    if onnx:
        worst = export.write_onnx(model, out / "model.onnx")
        lines.append(f"{out / 'model.onnx'}: log posteriors equal to {worst:.1g}")
    if posteriors:
        with tempfile.TemporaryDirectory() as folder:
            store: Stream
            if made_elsewhere(run):
                store = from_spec(posteriors)
            else:
                plain = features_of(run, read_data_dir(Path(posteriors), need_text=False), Path(folder) / "features", jobs)
                store = stream_for(run, "lstm", plain, lambda: adapt_unsupervised(run, plain, jobs=jobs))
            count = export.write_posteriors(out, ((name, model.log_posteriors(store[name])) for name in store.ids))
        lines.append(f"{out / 'post.scp'}: log posteriors of {count} utterances")
    return lines
