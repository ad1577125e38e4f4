"""Use a finished run: align, decode and export. Only the run directory is needed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from roundelay import config
from roundelay.errors import DataError
from roundelay.metrics import run_files
from roundelay.recipes.run_layout import LSTM, RunLayout
from roundelay.recipes.speaker_adaptation import adapt_supervised, adapt_unsupervised, stream_for
from roundelay.recipes.systems import PRIORS_FILE, System, chosen_scale, open_system
from roundelay.speech.corpora.kaldi_dir import read_data_dir
from roundelay.speech.corpora.utterance import Corpus
from roundelay.speech.decode import DecodeOptions, Hypothesis, decode_all, nbest_all
from roundelay.speech.features.extract import FeatureOptions, extract
from roundelay.speech.features.feature_store import FeatureStore, Stream, from_spec
from roundelay.speech.graph.hclg import load_graph
from roundelay.speech.hmm.align import align_all
from roundelay.speech.hmm.lexicon import Lexicon
from roundelay.speech.hmm.model import AlignmentModel
from roundelay.speech.nnet import export
from roundelay.speech.nnet.lstm import SHAPE_FILE, AcousticModel
from roundelay.speech.score import Score, score

FRAMES_PER_S = 100


def has_external_features(layout: RunLayout) -> bool:
    """Return True if the run was trained on features that Kaldi extracted."""
    return not layout.features_root.is_dir()


def feature_options(layout: RunLayout) -> FeatureOptions:
    """Return the feature options that the run's systems were trained with. Raise DataError for external features."""
    if has_external_features(layout):
        raise DataError(
            "this run was trained on external features and cannot extract them from recordings",
            where=str(layout.run),
            hint="decode with the recipe, or use export --posteriors with feature files",
        )
    return FeatureOptions(**FeatureStore.open(layout.features("train")).options)


def extract_like(layout: RunLayout, corpus: Corpus, directory: Path, jobs: int) -> FeatureStore:
    """Extract the features of a corpus with the options of a run."""
    return extract(corpus, directory, feature_options(layout), jobs=jobs, resample=True)


def describe_features(layout: RunLayout) -> dict[str, Any]:
    if has_external_features(layout):
        return {"streams": config.load(layout.network() / run_files.CONFIG).settings.task_options["features"]}
    return asdict(feature_options(layout))


def align_data(run: Path, data: Path, out: Path, system: str, jobs: int) -> str:
    """Align a data directory with a system of a run. Write the alignments and words.ctm; return a summary."""
    layout = RunLayout(run)
    corpus, lexicon = read_data_dir(data), Lexicon.read(layout.lexicon)
    acoustic = open_system(layout, system)
    model = AlignmentModel.load(layout.system("tri" if system == LSTM else system))
    transcripts = {u.id: u.words for u in corpus.utterances}
    with tempfile.TemporaryDirectory() as folder:
        plain = extract_like(layout, corpus, Path(folder) / "features", jobs)
        store = stream_for(layout, system, plain, lambda: adapt_supervised(layout, plain, transcripts, jobs=jobs))
        scale = chosen_scale(layout, system) if system == LSTM else 0.0
        scores = (lambda name: scale * acoustic.scores(store, name)) if system == LSTM else None
        alignments = align_all(model, store, corpus, lexicon, out, jobs=jobs, progress="auto", loglikes=scores)
    lines = [
        f"{name} 1 {start / FRAMES_PER_S:.2f} {(end - start) / FRAMES_PER_S:.2f} {word}"
        for name in alignments.ids
        for word, start, end in alignments.words(name)
    ]
    (out / "words.ctm").write_text("".join(f"{line}\n" for line in lines))
    skipped = "".join(f"\n  skipped {name}: {reason}" for name, reason in alignments.skipped.items())
    return f"{out}: {len(alignments.ids)} utterances aligned, {len(lines)} word times in words.ctm{skipped}"


@dataclass
class Recognizer:
    """A system of a run with its decoding graph."""

    layout: RunLayout
    name: str
    system: System
    graph: Path
    options: DecodeOptions

    @classmethod
    def open(cls, run: Path, system: str, *, graph: Path | None = None, scale: float = 0.0, beam: float = 0.0) -> Recognizer:
        """Load a system. graph, scale and beam default to those of the run. Raises DataError if the run does not exist."""
        if not run.is_dir():
            raise DataError("the run directory does not exist", where=str(run), hint="train with: roundelay run spoken")
        layout = RunLayout(run)
        options = DecodeOptions(acoustic_scale=scale or chosen_scale(layout, system))
        options = replace(options, beam=beam) if beam else options
        return cls(layout, system, open_system(layout, system), graph or layout.graph(system), options)

    def check_lexicon(self, path: Path) -> None:
        """Raise DataError if the graph was built with another lexicon."""
        load_graph(self.graph, lexicon=Lexicon.read(path))

    def recognize(
        self, data: Path, *, jobs: int = 1, allow_pipes: bool = False
    ) -> tuple[dict[str, Sequence[str]], Score | None]:
        """Decode a data directory. Return hypotheses by utterance, and their score if there are transcripts."""
        has_text = (data / "text").is_file()
        corpus = read_data_dir(data, need_text=has_text, allow_pipes=allow_pipes)
        with tempfile.TemporaryDirectory() as folder:
            plain = extract_like(self.layout, corpus, Path(folder) / "features", jobs)
            store = stream_for(self.layout, self.name, plain, lambda: adapt_unsupervised(self.layout, plain, jobs=jobs))
            decoded = decode_all(
                self.graph, lambda name: self.system.scores(store, name), store.ids, self.options, jobs=jobs, progress="auto"
            )
        hyps: dict[str, Sequence[str]] = {u.id: decoded[u.id].words if u.id in decoded else () for u in corpus.utterances}
        if not has_text:
            return hyps, None
        refs = {u.id: u.words for u in corpus.utterances}
        return hyps, score(refs, hyps, {u.id: u.speaker for u in corpus.utterances})

    def nbest(self, data: Path, count: int, *, jobs: int = 1, allow_pipes: bool = False) -> dict[str, list[Hypothesis]]:
        """Return at most `count` hypotheses of each utterance, the best first."""
        corpus = read_data_dir(data, need_text=False, allow_pipes=allow_pipes)
        with tempfile.TemporaryDirectory() as folder:
            plain = extract_like(self.layout, corpus, Path(folder) / "features", jobs)
            store = stream_for(self.layout, self.name, plain, lambda: adapt_unsupervised(self.layout, plain, jobs=jobs))
            return nbest_all(
                self.graph, lambda name: self.system.scores(store, name), store.ids, count, self.options, jobs=jobs
            )


def export_run(run: Path, out: Path, *, onnx: bool, posteriors: str, jobs: int) -> list[str]:
    """Write the network with its model card, and ONNX or posteriors if requested. Return one line per output."""
    layout = RunLayout(run)
    network = layout.system(LSTM)
    model = AcousticModel.load(network)
    facts = export.read_facts(network / SHAPE_FILE)
    for row in json.loads(layout.result.read_text())["systems"] if layout.result.exists() else []:
        if row["name"] == LSTM:
            facts[f"word error rate, {row['set']}"] = f"{row['wer']:.2f} % ({row['low']:.2f} - {row['high']:.2f})"
    model.save(out, facts)
    (out / PRIORS_FILE).write_bytes((network / PRIORS_FILE).read_bytes())
    (out / "features.json").write_text(json.dumps(describe_features(layout), indent=1))
    (out / "README.md").write_text(export.model_card(model, f"Acoustic model of {run.resolve().name}", facts))
    lines = [f"{out}: model.safetensors, model.json, priors.safetensors, features.json, README.md"]
    if onnx:
        worst = export.write_onnx(model, out / "model.onnx")
        lines.append(f"{out / 'model.onnx'}: log posteriors equal to {worst:.1g}")
    if posteriors:
        with tempfile.TemporaryDirectory() as folder:
            store: Stream
            if has_external_features(layout):
                store = from_spec(posteriors)
            else:
                corpus = read_data_dir(Path(posteriors), need_text=False)
                plain = extract_like(layout, corpus, Path(folder) / "features", jobs)
                store = stream_for(layout, LSTM, plain, lambda: adapt_unsupervised(layout, plain, jobs=jobs))
            count = export.write_posteriors(out, ((name, model.log_posteriors(store[name])) for name in store.ids))
        lines.append(f"{out / 'post.scp'}: log posteriors of {count} utterances")
    return lines
