"""The stages of a recipe. Each writes into a folder of the run directory and can be done again without harm.

data       data directories of the sets, lexicon, LM text           features   normalised log-mels
mono, tri  GMM-HMMs by Viterbi training                             align      tied states of train and dev
sat        transforms of speakers, and tied states in their space
network    the LSTM, trained through the engine                     graph      language model, decoding graphs
decode     hypotheses of every system, acoustic scale from dev      score      word error rates with intervals
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from roundelay import config
from roundelay.core import interrupts
from roundelay.errors import DataError, Interrupted, RoundelayError, UsageError
from roundelay.metrics.events import read_events
from roundelay.metrics.tensorboard import FOLDER, ScalarWriter
from roundelay.recipes.config import FILE, Recipe, SourceConfig, load
from roundelay.recipes.pack import archive_for
from roundelay.recipes.speaker_adaptation import (
    ADAPTED,
    SETTINGS,
    adapt_supervised,
    adapt_unsupervised,
    stream_for,
)
from roundelay.recipes.systems import FIRST_PASS, SYSTEMS, System, graph_of, open_system, save_network
from roundelay.report.run_reader import EVENTS, engine_folder
from roundelay.speech.corpora import hold_out, read_corpus
from roundelay.speech.corpora.kaldi_dir import read_data_dir, write_data_dir
from roundelay.speech.corpora.utterance import Corpus, Utterance
from roundelay.speech.decode import choose_scale, decode_all
from roundelay.speech.features.extract import FeatureOptions, extract
from roundelay.speech.features.feature_store import FeatureStore, Stream, from_spec
from roundelay.speech.features.speed_perturb import perturb_speed
from roundelay.speech.graph.hclg import Graph, build_graph
from roundelay.speech.graph.ngram import estimate, single_word_ngram
from roundelay.speech.hmm import word_times
from roundelay.speech.hmm.align import Alignments, align_all
from roundelay.speech.hmm.lexicon import Lexicon, pronounce
from roundelay.speech.hmm.model import AlignmentModel
from roundelay.speech.hmm.train_gmm import train_mono, train_sat, train_tri
from roundelay.speech.nnet.lstm import WEIGHTS_FILE, AcousticModel, model_folder
from roundelay.speech.score import paired, read_text, score, write_text

Say = Callable[[str], None]
TASK_FILE = "task.toml"
DECODED = "heard"
"""Below the adapted features: those of sets whose words had to be recognised first."""


@dataclass
class PipelineContext:
    """A recipe under way."""

    recipe: Recipe
    run: Path
    jobs: int
    say: Say
    progress: str = "auto"

    def corpus(self, name: str) -> Corpus:
        return read_data_dir(self.run / "data" / name)

    def store(self, name: str) -> FeatureStore:
        return FeatureStore.open(self.run / "features" / name)

    def lexicon(self) -> Lexicon:
        return Lexicon.read(self.run / "data" / "lexicon.txt")

    def sets(self) -> list[str]:
        """The names of the test sets."""
        return list(json.loads((self.run / "data" / "sets.json").read_text())["test"])


def aligned_run(named: str) -> Path:
    """The run directory of a recipe that has come as far as its alignments, which is what benchmarks of training begin from."""
    run = Path(named)
    if not (run / "alignments").is_dir():
        what = "there is no such run directory" if not run.is_dir() else "this run has no alignments yet"
        raise UsageError(what, where=named, hint="make it first: roundelay run spoken, and name the folder it wrote")
    return run


# -- data --------------------------------------------------------------------------------------------------------------


def data(work: PipelineContext) -> None:
    recipe, folder = work.recipe, recreate_dir(work.run / "data")
    sets: dict[str, list[Utterance]] = {"train": [], "dev": []}
    several = len(recipe.sources) > 1
    for source in recipe.sources:
        name = source.name or source.kind
        found = read_source(work, source)
        if not found.get("test") and found.get("dev"):
            found["test"] = found.pop("dev")  # as mini-LibriSpeech: what it calls dev is all there is to be tested on
        if not found.get("dev"):
            found["train"], found["dev"] = hold_out(found["train"], recipe.dev_share, recipe.seed)
        for part, utterances in found.items():
            kept = [u if not several else replace(u, id=f"{name}-{u.id}", speaker=f"{name}-{u.speaker}") for u in utterances]
            sets.setdefault(part if part in ("train", "dev") or not several else name, []).extend(kept)
    said = [u.words for u in sets["train"]]  # once, however many copies follow
    if recipe.speed_perturb:
        sets["train"] += perturb_speed(
            sets["train"],
            recipe.speed_perturb,
            folder / "speed_perturb",
            recipe.features.rate,
            jobs=work.jobs,
            progress=work.progress,
        )
    for part, utterances in sets.items():
        write_data_dir(folder / part, utterances)
        known = corpus_folder(work) / part / word_times.FILE
        if not several and known.exists() and not (recipe.speed_perturb and part == "train"):
            shutil.copy(known, folder / part / word_times.FILE)
        speakers = len({u.speaker for u in utterances})
        work.say(f"  {part}: {len(utterances)} utterances, {speakers} speakers")
    tests = [part for part in sets if part not in ("train", "dev")]
    (folder / "sets.json").write_text(json.dumps({"test": tests}))
    write_words(work, sets, said)


def read_source(work: PipelineContext, source: SourceConfig) -> dict[str, list[Utterance]]:
    root = Path(source.root) if source.root else None
    if source.kind == "synth":
        from roundelay.speech.synth.corpus import SynthOptions, synthesize

        root = corpus_folder(work).resolve()
        options = config.build(SynthOptions, source.options, f"recipe {work.recipe.folder.name}", section="source.options")
        if not synth_corpus_is_current(root, asdict(options)):
            synthesize(root, options, jobs=work.jobs, progress=work.progress)
        return {part: read_data_dir(root / part).utterances for part in ("train", "dev", "test")}
    if root is None or not root.is_absolute():
        data, named = os.environ.get("ROUNDELAY_DATA"), root or Path(source.kind)
        folders = [*([Path(data)] if data else []), work.recipe.folder]
        existing = next((folder / named for folder in folders if (folder / named).is_dir()), None)
        if existing is None:
            raise UsageError(
                f"corpus folder '{named}' does not exist in $ROUNDELAY_DATA or next to the recipe",
                where="source.root",
                hint="set ROUNDELAY_DATA to the folder that contains the corpus, or source.root to the corpus itself",
            )
        root = existing
    return read_corpus(source.kind, root.resolve())


def corpus_folder(work: PipelineContext) -> Path:
    """Of the first source; a synthesized corpus stands in the run directory unless it is wanted elsewhere."""
    return Path(work.recipe.sources[0].root) if work.recipe.sources[0].root else work.run / "corpus"


def synth_corpus_is_current(root: Path, options: dict[str, Any]) -> bool:
    """Whether this very corpus is there already: synth.json is written last."""
    about = root / "synth.json"
    return about.exists() and json.loads(about.read_text())["options"] == json.loads(json.dumps(options))


def write_words(work: PipelineContext, sets: dict[str, list[Utterance]], said: Sequence[Sequence[str]]) -> None:
    """lexicon.txt and lm.txt; `said` are the sentences of the training set."""
    recipe, folder = work.recipe, work.run / "data"
    corpus = corpus_folder(work)
    words = sorted({word for part in ("train", "dev") for u in sets[part] for word in u.words})
    if recipe.language.lexicon == "corpus":
        shutil.copy(corpus / "lexicon.txt", folder / "lexicon.txt")
    elif recipe.language.lexicon == "espeak":
        pronounce(words).write(folder / "lexicon.txt")
    else:
        Lexicon.read(recipe.folder / recipe.language.lexicon).write(folder / "lexicon.txt")
    lexicon = work.lexicon()
    if recipe.language.isolated_words:
        lines = sorted(lexicon.entries)
    elif recipe.language.text == "corpus":
        lines = (corpus / "lm.txt").read_text().splitlines()
    elif recipe.language.text == "train":
        lines = [" ".join(words) for words in said]
    else:
        lines = (recipe.folder / recipe.language.text).read_text().splitlines()
    (folder / "lm.txt").write_text("".join(f"{line}\n" for line in lines))
    missing = lexicon.missing(words)
    if missing:
        first = next(u for part in ("train", "dev") for u in sets[part] if missing[0] in u.words)
        raise DataError(
            f"{len(missing)} words of the transcripts have no pronunciation: {', '.join(missing[:8])}",
            where=f"utterance {first.id}, {first.audio}",
            hint="add them to the lexicon, or let espeak-ng propose them: roundelay lexicon --help",
        )


# -- features and alignments -------------------------------------------------------------------------------------------


def features(work: PipelineContext) -> None:
    of = work.recipe.features
    options = FeatureOptions(rate=of.rate, mels=of.mels, deltas=of.deltas, cmvn=of.cmvn)  # type: ignore[arg-type]
    for name in ("train", "dev", *work.sets()):
        folder = recreate_dir(work.run / "features" / name)
        store = extract(
            work.corpus(name),
            folder,
            options,
            jobs=work.jobs,
            resample=of.resample,
            progress=work.progress,
            longest_s=of.longest_s,
        )
        short = f", {len(store.skipped)} utterances too short and left out" if store.skipped else ""
        work.say(f"  {name}: {store.total_frames / 360_000:.2f} h{short}")


def mono(work: PipelineContext) -> None:
    with StageLog(work, "mono"):
        model = train_mono(
            work.store("train"), work.corpus("train"), work.lexicon(), work.recipe.mono,
            jobs=work.jobs, progress=work.progress,
        )  # fmt: skip
    model.save(recreate_dir(work.run / "mono"))


def tri(work: PipelineContext) -> None:
    before = AlignmentModel.load(work.run / "mono")
    with StageLog(work, "tri"):
        model = train_tri(
            before, work.store("train"), work.corpus("train"), work.lexicon(), work.recipe.tri,
            jobs=work.jobs, progress=work.progress,
        )  # fmt: skip
    model.save(recreate_dir(work.run / "tri"))


def sat(work: PipelineContext) -> None:
    """The speakers of train and dev adapted to their transcripts, then the tied states trained in what came out."""
    out = recreate_dir(work.run / ADAPTED)
    (out / SETTINGS).write_text(json.dumps({"prior_frames": work.recipe.sat.prior_frames}))
    for name in ("train", "dev"):
        said = {u.id: u.words for u in work.corpus(name).utterances}
        adapt_supervised(work.run, work.store(name), said, jobs=work.jobs, progress=work.progress).save(out / name)
    before, train = AlignmentModel.load(work.run / FIRST_PASS), from_spec(str(out / "train"))
    with StageLog(work, "sat"):
        model = train_sat(
            before, train, work.corpus("train"), work.lexicon(), work.recipe.sat,
            jobs=work.jobs, progress=work.progress,
        )  # fmt: skip
    model.save(recreate_dir(work.run / "sat"))


class StageLog(logging.Handler):
    """Write the log lines of GMM training to a file in the run's log folder, and report the last line."""

    def __init__(self, work: PipelineContext, stage: str) -> None:
        super().__init__(logging.INFO)
        self.work, self.path, self.last = work, work.run / "log" / f"{stage}.txt", ""
        self._logger = logging.getLogger("roundelay.speech.hmm")

    def __enter__(self) -> StageLog:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w", encoding="utf-8")
        self._before = self._logger.level, self._logger.propagate
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        self._logger.addHandler(self)
        return self

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()
        self._file.write(self.last + "\n")
        self._file.flush()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._logger.removeHandler(self)
        level, self._logger.propagate = self._before
        self._logger.setLevel(level)
        self._file.close()
        if kind is None:
            self.work.say(f"  {self.last}")


def align(work: PipelineContext) -> None:
    align_sets(work, work.run / "alignments")


def align_sets(work: PipelineContext, alignments: Path, system: System | None = None) -> None:
    """Train and dev, with the tied states' own scores or with those of a system that shares them."""
    model = AlignmentModel.load(work.run / "tri")
    for name in ("train", "dev"):
        folder, store = recreate_dir(alignments / name), work.store(name)
        scores = None
        if system is not None:
            taken = from_spec(features_named(work.run, name, work.recipe.network.adapted))
            scores = partial(scaled_scores, system, taken, work.recipe.decode.acoustic_scale)
        found = align_all(
            model, store, work.corpus(name), work.lexicon(), folder, jobs=work.jobs, progress=work.progress, loglikes=scores
        )
        work.say(f"  {name}: {len(found.ids)} aligned, {len(found.skipped)} skipped")
        known = work.run / "data" / name / word_times.FILE
        if known.exists():
            offsets = word_times.compare(found, word_times.read_word_times(known))
            work.say(f"  {name}: {offsets.line()}")
            (alignments / f"offsets-{name}.json").write_text(json.dumps(offsets.as_json()))


def scaled_scores(system: System, store: Stream, scale: float, utterance: str) -> np.ndarray:
    return scale * system.scores(store, utterance)


# -- the network -------------------------------------------------------------------------------------------------------


def network(work: PipelineContext) -> None:
    """The LSTM; with `realign_passes` it then aligns its own training set, and the next one learns from that."""
    folder, alignments = work.run / "network", work.run / "alignments"
    for number in range(work.recipe.realign_passes + 1):
        if number:
            work.say(f"  aligning with the network, {number} of {work.recipe.realign_passes}")
            folder, alignments = work.run / f"network-{number + 1}", work.run / f"alignments-{number + 1}"
            align_sets(work, alignments, open_system(work.run, "lstm"))
        train_network(work, folder, work.recipe.train, alignments, work.recipe.seed)
        finish_network(work, folder, work.run / "lstm")


def train_network(
    work: PipelineContext,
    folder: Path,
    settings: dict[str, Any],
    alignments: Path,
    seed: int,
    features: dict[str, str] | None = None,
) -> None:
    """Runs the engine; an interrupted run of the same settings on the same alignments goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    begun = pretrained_model(work)
    origins = f"# alignments {origin_of_alignments(work)}" + (f", begun from {weights_hash(begun)}" if begun else "")
    text = f"{origins}\n" + task_file(work, settings, alignments, seed, features)
    file = folder / TASK_FILE
    if not file.exists() or file.read_text() != text:
        recreate_dir(folder)
        file.write_text(text)
    command = [sys.executable, "-m", "roundelay", "train", str(file), f"run={json.dumps(str(folder))}", "resume=auto"]
    ended = interrupts.run_command([*command, f"progress={work.progress}"])
    if ended == Interrupted.exit_code or (ended and interrupts.was_interrupted()):
        raise Interrupted(
            "training was stopped; its checkpoint is kept", where=str(folder), hint="run the recipe again to go on"
        )
    if ended != 0:
        raise RoundelayError(
            f"training ended with exit code {ended}", where=str(folder), hint="see the lines above, and log/ there"
        )


def origin_of_alignments(work: PipelineContext) -> str:
    """The fingerprint of the stage that made them: they stand in the same place whatever they were made from."""
    marks = [work.run / "stages" / f"{stage}.json" for stage in ("align", "states")]
    return next((json.loads(mark.read_text())["fingerprint"] for mark in marks if mark.exists()), "of unknown origin")


def pretraining_run(work: PipelineContext) -> PipelineContext | None:
    """The recipe whose network this one's begins from; its run stands beside this one's."""
    folder = work.recipe.pretraining_recipe
    if folder is None:
        return None
    run = work.run.resolve().parent / folder.name
    if (run / FILE).exists():
        raise UsageError(
            f"the run of '{folder.name}', which this network begins from, would stand in a recipe's own folder",
            where=str(run),
            hint="give this run another place, such as run=runs/mine",
        )
    return replace(work, recipe=load(folder), run=run)


def pretrained_model(work: PipelineContext) -> Path | None:
    """The folder of the model that training begins from."""
    before = pretraining_run(work)
    if before is not None:
        return before.run / "lstm"
    named = work.recipe.network.init_from
    return model_folder(Path(named)) if named else None


def weights_hash(folder: Path) -> str:
    """Sixteen digits that differ where a model's weights do."""
    try:
        return hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise DataError(
            f"the network to start from cannot be read: {error}",
            where=f"network.init_from, {folder}",
            hint="name a recipe, a finished run, or a folder with model.json and model.safetensors",
        ) from error


def task_file(
    work: PipelineContext, settings: dict[str, Any], alignments: Path, seed: int, features: dict[str, str] | None = None
) -> str:
    run = work.run.resolve()
    of = features or {name: features_named(run, name, work.recipe.network.adapted) for name in ("train", "dev")}
    options = {
        "features": of["train"],
        "alignments": str(alignments.resolve() / "train"),
        "valid_features": of["dev"],
        "valid_alignments": str(alignments.resolve() / "dev"),
        "seed": seed,
        **work.recipe.network.task_kwargs(),
    }
    begun = pretrained_model(work)
    if begun is not None:
        options["init_from"] = str(begun.resolve())
    wanted = {"task": "roundelay.speech.nnet.frame_task:FrameTask", "seed": seed, **settings}
    if work.recipe.network.packed:
        options["archive"] = str(archive_for(options, alignments, jobs=work.jobs, progress=work.progress, say=work.say))
        wanted = {"num_workers": 2, **wanted, "task": "roundelay.recipes.packed_task:PackedTask"}
    made = config.TrainConfig(**wanted, task_options=options)
    return config.dumps(made)


def features_named(run: Path, name: str, adapted: bool) -> str:
    plain = run / "features" / name
    return f"{plain}+{run / ADAPTED / name}" if adapted else str(plain)


def finish_network(work: PipelineContext, trained: Path, folder: Path) -> None:
    """The averaged model of an engine run as a system."""
    resolved = config.load(trained / TASK_FILE)
    settings, task = resolved.settings, config.build_task(resolved)
    model = AcousticModel(task.shape)
    model.load_state_dict(load_file(str(trained / "model.safetensors")))
    counts = Alignments.open(Path(settings.task_options["alignments"])).counts()
    about = {"strategy": settings.strategy, "learners": settings.learners, "epochs": settings.epochs, "samples": task.samples}
    if work.recipe.network.adapted:
        about["adapted"] = True
    save_network(recreate_dir(folder), model, counts, about)


# -- words -------------------------------------------------------------------------------------------------------------


def graph(work: PipelineContext) -> None:
    lexicon = work.lexicon()
    sentences = [line.split() for line in (work.run / "data" / "lm.txt").read_text().splitlines() if line.strip()]
    order = work.recipe.language.order
    lm = (
        single_word_ngram(lexicon.entries)
        if work.recipe.language.isolated_words
        else estimate(sentences, order, sorted(lexicon.entries))
    )
    lm.write_arpa(work.run / "lm.arpa")
    perplexity, unknown = {}, {}
    for name in work.sets():
        text = [u.words for u in work.corpus(name).utterances]
        fit = lm.measure(text)
        perplexity[name], unknown[name] = fit.perplexity, fit.oov.total() / max(1, sum(map(len, text)))
        work.say(f"  {name}: perplexity {perplexity[name]:.1f}; {100 * unknown[name]:.1f} % of the words are unknown to it")
    about = {"order": lm.order, "words": len(lexicon.entries), "sentences": len(sentences)}
    (work.run / "lm.json").write_text(json.dumps({**about, "perplexity": perplexity, "unknown": unknown}))
    for system, folder in (("mono", "graph-mono"), ("tri", "graph-tri")):
        if (work.run / system).is_dir():
            build_graph(
                AlignmentModel.load(work.run / system), lexicon, lm, recreate_dir(work.run / folder), progress=work.progress
            )


def decode(work: PipelineContext) -> None:
    shutil.rmtree(work.run / ADAPTED / DECODED, ignore_errors=True)
    for system in work.recipe.systems:
        decode_system(work, work.run, system, work.run / "decode" / system)


def decode_system(work: PipelineContext, run: Path, system: str, folder: Path) -> None:
    """Acoustic scale on dev, then every test set."""
    recreate_dir(folder)
    work.say(f"  {SYSTEMS[system]}")
    made, graph_folder = open_system(run, system), work.run / graph_of(system)
    dev, store = work.corpus("dev"), stream_for(run, system, work.store("dev"), partial(adapted_features_of, work, "dev"))
    some = [u.id for u in dev.utterances if u.id in set(store.ids)]
    some = some[:: max(1, len(some) // work.recipe.dev_utterances)]
    refs = {name: dev.by_id[name].words for name in some}
    options = replace(
        work.recipe.decode, acoustic_scale=best_scale(work, graph_folder, partial(made.scores, store), refs, folder)
    )
    for name in work.sets():
        test = stream_for(run, system, work.store(name), partial(adapted_features_of, work, name))
        found = decode_all(graph_folder, partial(made.scores, test), test.ids, options, jobs=work.jobs, progress=work.progress)
        write_text(folder / f"{name}.txt", {u: h.words for u, h in found.items()})


def adapted_features_of(work: PipelineContext, name: str) -> Stream:
    """A set adapted to what the first pass has recognised in it; estimated once for all systems that ask."""
    folder = work.run / ADAPTED / DECODED / name
    if not folder.is_dir():
        adapt_unsupervised(work.run, work.store(name), jobs=work.jobs, progress=work.progress).save(folder)
    return from_spec(str(folder))


def best_scale(
    work: PipelineContext, graph: Path | Graph, scores: Callable[[str], np.ndarray], refs: dict[str, Any], folder: Path
) -> float:
    """The acoustic scale with the fewest errors on dev; kept in scale.json."""
    choice = choose_scale(graph, scores, refs, work.recipe.decode, work.recipe.scales, jobs=work.jobs, progress=work.progress)
    table = {f"{scale:g}": round(found.wer, 2) for scale, found in choice.scores.items()}
    work.say(f"  acoustic scale {choice.scale:g}; dev " + ", ".join(f"{scale}: {wer:.1f} %" for scale, wer in table.items()))
    (folder / "scale.json").write_text(json.dumps({"acoustic_scale": choice.scale, "dev_wer": table}))
    return choice.scale


def score_all(work: PipelineContext) -> dict[str, Any]:
    """result.json"""
    rows: list[dict[str, Any]] = []
    comparisons: list[dict[str, Any]] = []
    for name in work.sets():
        corpus = work.corpus(name)
        refs = {u.id: u.words for u in corpus.utterances}
        speakers = {u.id: u.speaker for u in corpus.utterances}
        hyps = {system: read_text(work.run / "decode" / system / f"{name}.txt") for system in work.recipe.systems}
        for system in work.recipe.systems:
            found = score(refs, hyps[system], speakers)
            rows.append({"name": system, "set": name, **found.as_json(), "line": found.line()})
        for worse, better in zip(work.recipe.systems, work.recipe.systems[1:], strict=False):
            pair = paired(refs, hyps[worse], hyps[better], speakers)
            comparisons.append({"set": name, "from": worse, "to": better, **rounded(asdict(pair))})
    result = {"systems": rows, "paired": comparisons, "language_model": json.loads((work.run / "lm.json").read_text())}
    (work.run / "result.json").write_text(json.dumps(result, indent=1))
    post_word_errors(work.run, rows)
    return result


def post_word_errors(run: Path, rows: list[dict[str, Any]]) -> None:
    """The trained network's word error rate, beside its other metrics in TensorBoard."""
    trained = engine_folder(run)
    rates = [row["wer"] for row in rows if row["name"] == "lstm"]
    if trained is None or not rates or not (trained / FOLDER).is_dir():
        return
    position = max((int(e["position"]) for e in read_events(trained / EVENTS) if e["event"] == "evaluation"), default=0)
    board = ScalarWriter(trained / FOLDER, position + 1)
    board.scalars(position, {"valid/wer": rates[0]})
    board.close()


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}


def recreate_dir(folder: Path) -> Path:
    """An empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
