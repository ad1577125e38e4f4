"""The readers under test: for each a function that writes valid files, and one that reads them as a command does."""

from __future__ import annotations

import io
import json
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from mutate import CANARY, mutate

from roundelay.cli.main import main
from roundelay.core.contracts import Task
from roundelay.data.archive import Archive
from roundelay.engine.config import TrainConfig
from roundelay.engine.trainer import train
from roundelay.errors import RoundelayError
from roundelay.launch.threads import run_threads
from roundelay.speech.corpora.kaldi_dir import read_data_dir
from roundelay.speech.corpora.utterance import Utterance
from roundelay.speech.features.audio import read_audio
from roundelay.speech.features.feature_store import from_spec
from roundelay.speech.features.kaldi_ark import read_matrices, write_matrices
from roundelay.speech.graph.fst import arrays_to_fst, fst_to_arrays, read_fst
from roundelay.speech.graph.ngram import estimate, read_arpa
from roundelay.speech.hmm.lexicon import Lexicon
from roundelay.speech.nnet.lstm import AcousticModel, ModelShape
from roundelay.testing.tasks import SyntheticFrames

LIMIT_S = 10
EXIT_CODES = (0, 2, 3)
TEXT = [["ONE", "TWO"], ["TWO"], ["ONE", "ONE", "TWO"]]
RUN = {"samples": 48, "held_out": 8, "hidden": 4, "frames": 4}


class Hang(BaseException):
    """A case that exceeded LIMIT_S."""


@dataclass
class Outcome:
    cases: int = 0
    tracebacks: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    executed: int = 0


@dataclass(frozen=True)
class Reader:
    """`write` makes valid files in a folder; `read` reads the folder and returns an exit code or raises RoundelayError."""

    name: str
    write: Callable[[Path], None]
    read: Callable[[Path], int | None]
    damaged: tuple[str, ...] = ("**/*",)
    """Patterns of the files to damage."""


# -- samples ---------------------------------------------------------------------------------------------------------------


def write_run(folder: Path, seed: int = 0, strategy: str = "adpsgd") -> None:
    """Train two learners in threads and write the run as the command does."""
    from roundelay import config

    settings = TrainConfig(
        strategy=strategy, epochs=1, batch=4, progress="none", run=str(folder), seed=seed, tensorboard=False, learners=2,
        record_order=strategy == "adpsgd", task="roundelay.testing.tasks:SyntheticFrames", task_options=dict(RUN),
        backend="threads",
    )  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config.dumps(settings))
    task: Task = SyntheticFrames(**{**RUN, "seed": seed})
    recorded = config.computation_settings(settings) if settings.record_order else None
    run_threads(lambda context: train(task, context, settings, record_settings=recorded), size=2)
    shutil.rmtree(folder / "ckpt", ignore_errors=True)
    row = {"name": "lstm", "set": "test", "wer": 10.0, "low": 8.0, "high": 12.0, "words": 100}
    pair = {"from": "tri", "to": "lstm", "set": "test", "difference": -1.0, "low": -2.0, "high": 0.5}
    (folder / "result.json").write_text(json.dumps({"systems": [row], "paired": [pair]}))


def write_two_runs(folder: Path) -> None:
    write_run(folder / "a", 0, "adpsgd")
    write_run(folder / "b", 0, "sync")


def write_features(folder: Path) -> None:
    from packed import features

    features(folder / "feats", [12, 30, 7])


def write_archive(folder: Path) -> None:
    from packed import corpus, packed

    packed(folder / "archive", corpus(folder / "corpus", 6))
    shutil.rmtree(folder / "corpus")


def write_ark(folder: Path) -> None:
    rng = np.random.default_rng(0)
    write_matrices(folder / "f.ark", folder / "f.scp", ((f"u{n}", rng.normal(size=(5 + n, 3))) for n in range(4)))


def write_arpa(folder: Path) -> None:
    estimate(TEXT, 2).write_arpa(folder / "lm.arpa")
    estimate(TEXT, 2).write_arpa(folder / "lm.arpa.gz")


def write_graphs(folder: Path) -> None:
    import kaldifst
    from toy_kaldi import write_graph

    write_graph(folder / "graph", by_pdf=True)
    fst = kaldifst.StdVectorFst.read(str(folder / "graph" / "HCLG.fst"))
    arrays_to_fst(fst_to_arrays(fst)).write(str(folder / "graph" / "vector.fst"))
    kaldifst.StdConstFst(fst).write(str(folder / "graph" / "const.fst"))


def write_audio(folder: Path) -> None:
    samples = 0.1 * np.random.default_rng(0).normal(size=4000)
    soundfile.write(folder / "u1.wav", samples, 8000)
    soundfile.write(folder / "u2.flac", samples, 8000)


def write_data(folder: Path) -> None:
    write_audio(folder)
    (folder / "wav.scp").write_text(f"u1 {folder / 'u1.wav'}\nu2 {folder / 'u2.flac'}\n")
    (folder / "text").write_text("u1 ONE TWO\nu2 TWO\n")
    (folder / "utt2spk").write_text("u1 s\nu2 s\n")
    (folder / "segments").write_text("u1 u1 0.0 0.3\nu2 u2 0.1 0.4\n")


def write_lexicon(folder: Path) -> None:
    (folder / "lexicon.txt").write_text("ONE W AH N\nTWO T UW\nTWO(2) T UH\n")


def write_settings(folder: Path) -> None:
    (folder / "c.toml").write_text(
        'task = "roundelay.testing.tasks:SyntheticFrames"\nstrategy = "kstep"\nseed = 1\nlr = 0.1\nbatch = 4\ndevice = "cpu"\n'
        'topology = "ring"\n[strategy_options]\nK = 2\n[task_options]\nsamples = 48\nhidden = 4\nframes = 4\n'
    )


def write_cluster(folder: Path) -> None:
    (folder / "c.toml").write_text(
        "[[machines]]\ncount = 1\nlearners = 2\n[learner]\nseconds_per_sample = 0.001\nseconds_per_step = 0.01\n"
        "[learner.jitter]\nkind = 'gaussian'\nspread = 0.1\n[link.between]\ngbit_per_s = 1.0\nlatency_us = 50.0\n"
        "[[straggler]]\nlearner = 1\nfactor = 2.0\nfrom_s = 0.0\nto_s = 1.0\n"
    )


def write_recipe(folder: Path) -> None:
    for name in ("train", "dev", "test"):
        (folder / "corpus" / name).mkdir(parents=True)
        write_data(folder / "corpus" / name)
    write_lexicon(folder)
    (folder / "recipe.toml").write_text(
        '[[source]]\nkind = "kaldi"\nroot = "corpus"\n[features]\nresample = false\n'
        '[language]\nlexicon = "lexicon.txt"\ntext = "train"\n'
    )


def write_texts(folder: Path) -> None:
    for name in ("ref", "hyp"):
        (folder / name).write_text("u1 ONE TWO\nu2 TWO\nu3 ONE ONE\n")


def write_model(folder: Path) -> None:
    AcousticModel(ModelShape(inputs=4, outputs=3, layers=1, hidden=4, bottleneck=0)).save(folder / "model", {})


# -- reading ---------------------------------------------------------------------------------------------------------------


def read_archive(folder: Path) -> None:
    archive = Archive(folder / "archive")
    archive.verify()


def read_stores(folder: Path) -> None:
    store = from_spec(str(folder / "feats"))
    for id in store.ids:
        store[id]


def read_ark(folder: Path) -> None:
    matrices = read_matrices(folder / "f.scp")
    for id in matrices:
        matrices.shape(id)
        matrices[id]


def read_all(paths: list[Path], read: Callable[[Path], Any]) -> None:
    """Read every file, and raise the last error."""
    last: RoundelayError | None = None
    for path in paths:
        try:
            read(path)
        except RoundelayError as error:
            last = error
    if last is not None:
        raise last


def read_sounds(folder: Path) -> None:
    for path in sorted(folder.glob("u*")):
        for start, end in ((float("nan"), 0.3), (0.0, float("inf")), (0.0, float("nan"))):
            with suppress(RoundelayError):
                read_audio(Utterance("u", "s", (), path, start, end), 8000)
        read_audio(Utterance("u", "s", (), path), 8000)


def read_corpus(folder: Path) -> None:
    for utterance in read_data_dir(folder).utterances:
        read_audio(utterance, 8000)


def read_settings(folder: Path) -> int:
    from roundelay import config
    from roundelay.cli.train import validate

    resolved = config.load(folder / "c.toml")
    validate(resolved)
    config.build_task(resolved)
    return main(["config", str(folder / "c.toml")])


READERS = [
    Reader(
        "report", write_run, lambda f: main(["report", str(f), "--out", str(f / "page.html")]), ("*.jsonl", "*.toml", "*.json")
    ),
    Reader(
        "compare",
        write_two_runs,
        lambda f: main(["compare", str(f / "a"), str(f / "b")]),
        ("*/*.jsonl", "*/*.toml", "*/*.json"),
    ),
    Reader(
        "replay",
        write_run,
        lambda f: main(["replay", str(f), "--json"]),
        ("order/*", "config.toml", "*.safetensors", "*/rank-*"),
    ),
    Reader("features", write_features, read_stores),
    Reader("archive", write_archive, read_archive),
    Reader("ark", write_ark, read_ark),
    Reader("arpa", write_arpa, lambda f: read_all(sorted(f.glob("lm*")), read_arpa)),
    Reader("fst", write_graphs, lambda f: read_all(sorted(f.glob("graph/*.fst")), lambda p: fst_to_arrays(read_fst(p)))),
    Reader("audio", write_audio, read_sounds),
    Reader("data", write_data, read_corpus, ("wav.scp", "text", "utt2spk", "segments")),
    Reader("lexicon", write_lexicon, lambda f: Lexicon.read(f / "lexicon.txt") and None),
    Reader("settings", write_settings, read_settings),
    Reader("cluster", write_cluster, lambda f: main(["simulate", str(f / "c.toml"), "steps=3", f"run={f / 'run'}", "batch=4"])),
    Reader(
        "recipe",
        write_recipe,
        lambda f: main(["run", str(f), f"run={f / 'run'}", "--until", "data", "--jobs", "1"]),
        ("*.toml",),
    ),
    Reader("score", write_texts, lambda f: main(["score", str(f / "ref"), str(f / "hyp")])),
    Reader("model", write_model, lambda f: AcousticModel.load(f / "model") and None),
]


# -- running ---------------------------------------------------------------------------------------------------------------


@contextmanager
def time_limit() -> Iterator[None]:
    def expired(number: int, frame: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_case(reader: Reader, valid: Path, folder: Path, seed: int, outcome: Outcome) -> None:
    """Damage one file of a fresh copy and read it."""
    rng = random.Random(f"{reader.name}-{seed}")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(valid, folder)
    for path in folder.rglob("*.scp"):
        path.write_text(path.read_text().replace(str(valid), str(folder)))
    files = sorted({p for pattern in reader.damaged for p in folder.glob(pattern) if p.is_file()})
    victim = rng.choice(files)
    victim.write_bytes(mutate(victim.read_bytes(), rng, rng.choice(files).read_bytes()))
    outcome.cases += 1
    name = f"{reader.name} case {seed}, {victim.relative_to(folder)}"
    path_before = list(sys.path)
    sink = io.StringIO()
    try:
        with chdir(folder), time_limit(), redirect_stdout(sink), redirect_stderr(sink):
            code = reader.read(folder)
        if code not in (None, *EXIT_CODES):
            outcome.tracebacks.append(f"{name}: exit code {code}: {sink.getvalue()[-300:]}")
    except RoundelayError as error:
        if error.exit_code not in EXIT_CODES:
            outcome.tracebacks.append(f"{name}: exit code {error.exit_code}: {error}")
    except SystemExit as error:
        if error.code not in EXIT_CODES:
            outcome.tracebacks.append(f"{name}: exit code {error.code}")
    except Hang:
        outcome.hangs.append(name)
    except Exception:
        outcome.tracebacks.append(f"{name}: {''.join(traceback.format_exc().splitlines(keepends=True)[-7:])}")
    sys.path[:] = path_before
    outcome.executed += any(folder.parent.rglob(CANARY))


def fuzz(reader: Reader, folder: Path, cases: int, first: int = 0) -> Outcome:
    """Write valid files, check that they are accepted, then read `cases` damaged copies."""
    valid = folder / "valid"
    if reader.write is not write_run:
        valid.mkdir(parents=True)
    reader.write(valid)
    outcome = Outcome()
    shutil.copytree(valid, folder / "case")
    for path in (folder / "case").rglob("*.scp"):
        path.write_text(path.read_text().replace(str(valid), str(folder / "case")))
    sink = io.StringIO()
    with chdir(folder), redirect_stdout(sink), redirect_stderr(sink):
        code = reader.read(folder / "case")
    if code not in (None, 0):
        raise AssertionError(f"{reader.name}: undamaged files end with {code}: {sink.getvalue()[-500:]}")
    for seed in range(first, first + cases):
        run_case(reader, valid, folder / "case", seed, outcome)
    return outcome
