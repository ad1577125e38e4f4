"""The data stage: read the sources of a recipe, write data directories, the lexicon and the text of the language model."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from roundelay import config
from roundelay.errors import DataError, UsageError, reading
from roundelay.recipes.config import Recipe, SourceConfig
from roundelay.recipes.pipeline_context import PipelineContext, recreate_dir
from roundelay.speech.corpora import hold_out, read_corpus
from roundelay.speech.corpora.kaldi_dir import read_data_dir, write_data_dir
from roundelay.speech.corpora.utterance import Utterance
from roundelay.speech.features.speed_perturb import perturb_speed
from roundelay.speech.hmm import word_times
from roundelay.speech.hmm.lexicon import Lexicon, pronounce

logger = logging.getLogger(__name__)
DATA_VARIABLE = "ROUNDELAY_DATA"
"""Environment variable: the directory in which relative source roots are looked up first."""


def prepare_data(context: PipelineContext) -> None:
    """Write data/SET for train, dev and every test set, data/sets.json, data/lexicon.txt and data/lm.txt."""
    recipe, layout = context.recipe, context.layout
    recreate_dir(layout.data)
    sets: dict[str, list[Utterance]] = {"train": [], "dev": []}
    several = len(recipe.sources) > 1
    for source in recipe.sources:
        name = source.name or source.kind
        parts = read_source(context, source)
        if not parts.get("test") and parts.get("dev"):
            parts["test"] = parts.pop("dev")  # mini-LibriSpeech has a dev set but no test set
        if not parts.get("dev"):
            parts["train"], parts["dev"] = hold_out(parts["train"], recipe.dev_share, recipe.seed)
        for part, utterances in parts.items():
            renamed = [u if not several else replace(u, id=f"{name}-{u.id}", speaker=f"{name}-{u.speaker}") for u in utterances]
            sets.setdefault(part if part in ("train", "dev") or not several else name, []).extend(renamed)
    sentences = [u.words for u in sets["train"]]  # before speed perturbation, so that each sentence counts once
    if recipe.speed_perturb:
        sets["train"] += perturb_speed(
            sets["train"],
            recipe.speed_perturb,
            layout.speed_perturbed,
            recipe.features.rate,
            jobs=context.jobs,
            progress=context.progress,
        )
    for part, utterances in sets.items():
        directory = layout.data_set(part)
        write_data_dir(directory, utterances)
        times = corpus_dir(context) / part / word_times.FILE
        if not several and times.exists() and not (recipe.speed_perturb and part == "train"):
            shutil.copy(times, directory / word_times.FILE)
        logger.info("  %s: %d utterances, %d speakers", part, len(utterances), len({u.speaker for u in utterances}))
    layout.sets.write_text(json.dumps({"test": [part for part in sets if part not in ("train", "dev")]}))
    write_language_files(context, sets, sentences)


def read_source(context: PipelineContext, source: SourceConfig) -> dict[str, list[Utterance]]:
    """Return the sets of one source. Synthesize the corpus first if `source` is a synthesizer and its corpus is outdated."""
    if source.kind != "synth":
        with reading("the corpus", "source.root", "set source.root to the folder of the corpus"):
            return read_corpus(source.kind, source_root(context.recipe, source))
    from roundelay.speech.synth.corpus import SynthOptions, synthesize

    root = corpus_dir(context).resolve()
    options = config.build(SynthOptions, source.options, f"recipe {context.recipe.folder.name}", section="source.options")
    if not synth_corpus_is_current(root, asdict(options)):
        synthesize(root, options, jobs=context.jobs, progress=context.progress)
    return {part: read_data_dir(root / part).utterances for part in ("train", "dev", "test")}


def source_root(recipe: Recipe, source: SourceConfig) -> Path:
    """Return the directory of a source. Look up a relative one in $ROUNDELAY_DATA, then in the recipe's directory."""
    root = Path(source.root or source.kind)
    if source.root and root.is_absolute():
        return root.resolve()
    parents = [*([Path(os.environ[DATA_VARIABLE])] if os.environ.get(DATA_VARIABLE) else []), recipe.folder]
    existing = next((parent / root for parent in parents if (parent / root).is_dir()), None)
    if existing is None:
        raise UsageError(
            f"corpus folder '{root}' does not exist in $ROUNDELAY_DATA or next to the recipe",
            where="source.root",
            hint="set ROUNDELAY_DATA to the folder that contains the corpus, or source.root to the corpus itself",
        )
    return existing.resolve()


def corpus_dir(context: PipelineContext) -> Path:
    """Return the corpus of the first source. A synthesized corpus is written to the run directory unless it has a root."""
    root = context.recipe.sources[0].root
    return Path(root) if root else context.layout.corpus


def synth_corpus_is_current(root: Path, options: dict[str, Any]) -> bool:
    """Return True if `root` holds a complete corpus of these options. synth.json is written last."""
    info = root / "synth.json"
    return info.exists() and json.loads(info.read_text())["options"] == json.loads(json.dumps(options))


def _text_lines(path: Path) -> list[str]:
    with reading("the text of the language model", path, "set language.text to a text file"):
        return path.read_text(encoding="utf-8").splitlines()


def write_language_files(
    context: PipelineContext, sets: dict[str, list[Utterance]], sentences: Sequence[Sequence[str]]
) -> None:
    """Write the lexicon and the text of the language model. `sentences` are the transcripts of the training set.

    Raises DataError if a word of train or dev has no pronunciation.
    """
    language, layout = context.recipe.language, context.layout
    corpus = corpus_dir(context)
    words = sorted({word for part in ("train", "dev") for u in sets[part] for word in u.words})
    if language.lexicon == "corpus":
        with reading("the lexicon of the corpus", corpus / "lexicon.txt", "set language.lexicon"):
            shutil.copy(corpus / "lexicon.txt", layout.lexicon)
    elif language.lexicon == "espeak":
        pronounce(words).write(layout.lexicon)
    else:
        Lexicon.read(context.recipe.folder / language.lexicon).write(layout.lexicon)
    lexicon = context.lexicon()
    if language.isolated_words:
        lines = sorted(lexicon.entries)
    elif language.text == "corpus":
        lines = _text_lines(corpus / "lm.txt")
    elif language.text == "train":
        lines = [" ".join(sentence) for sentence in sentences]
    else:
        lines = _text_lines(context.recipe.folder / language.text)
    layout.lm_text.write_text("".join(f"{line}\n" for line in lines))
    missing = lexicon.missing(words)
    if missing:
        first = next(u for part in ("train", "dev") for u in sets[part] if missing[0] in u.words)
        raise DataError(
            f"{len(missing)} words of the transcripts have no pronunciation: {', '.join(missing[:8])}",
            where=f"utterance {first.id}, {first.audio}",
            hint="add them to the lexicon, or generate them with espeak-ng: roundelay lexicon --help",
        )


# -- which files a stage reads from outside the run directory --------------------------------------------------------------


def source_files(recipe: Recipe) -> Iterator[Path]:
    """Yield the files that the data stage reads: recordings and transcripts of all sources, lexicon, text.

    A synthesized corpus is a function of its options, which are part of the settings, so its files are not listed.
    """
    for source in recipe.sources:
        if source.kind != "synth":
            yield from corpus_files(source_root(recipe, source))
    language = recipe.language
    if recipe.sources and language.lexicon not in ("corpus", "espeak"):
        yield recipe.folder / language.lexicon
    if recipe.sources and language.text not in ("corpus", "train") and not language.isolated_words:
        yield recipe.folder / language.text


def corpus_files(root: Path) -> Iterator[Path]:
    """Yield all files below `root`, and the recordings that its wav.scp files name."""
    for directory, _, names in os.walk(root):
        for name in names:
            path = Path(directory, name)
            yield path
            if name == "wav.scp":
                for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                    _, _, audio = line.strip().partition(" ")
                    if audio and not audio.rstrip().endswith("|"):
                        yield root / audio.strip()


def manifest_hash(paths: Iterable[Path]) -> str:
    """Return a hash of path, size and modification time of the files. A directory counts as the files directly in it."""
    rows: set[tuple[str, int, int]] = set()
    for path in paths:
        status = status_of(path)
        if status is None:
            rows.add((str(path), -1, 0))
        elif stat.S_ISDIR(status.st_mode):
            entries = [(entry.path, entry.stat()) for entry in os.scandir(path)]
            rows.update((name, inside.st_size, inside.st_mtime_ns) for name, inside in entries)
        else:
            rows.add((str(path), status.st_size, status.st_mtime_ns))
    return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()[:16] if rows else ""


def status_of(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
