"""`roundelay pack`: pack the training examples of a run into an archive that learners read.

Examples are the windows of `roundelay.speech.features.windows`, or whole utterances, with their context frames. The seed
shuffles all of them at once. Blocks are independent: worker processes encode them, one process writes them in order.
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from dataclasses import asdict, dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from roundelay import config
from roundelay.core.process_map import process_map
from roundelay.data import writer
from roundelay.data.archive import IGNORE, INDEX, Archive, ArchiveMetadata, Layout, encode
from roundelay.errors import DataError, UsageError, did_you_mean
from roundelay.metrics import run_files
from roundelay.recipes.run_layout import RunLayout, archive_dir
from roundelay.speech.features import windows
from roundelay.speech.features.feature_store import ConcatFeatures, FeatureStore, from_spec
from roundelay.speech.hmm.align import INDEX as ALIGNMENTS_INDEX
from roundelay.speech.hmm.align import Alignments, matching_utterances

logger = logging.getLogger(__name__)
KINDS = ("chunks", "utterances")
SHUFFLE_STREAM = 0x9ACC
"""Second word of the seed of the shuffle, so that it differs from other random streams of the same seed."""
HASHED_FRAMES = 65_536
"""ArchiveMetadata how many frames of the alignments enter the configuration hash."""
CHUNK_BLOCK, UTTERANCE_BLOCK = 256, 16


@dataclass(frozen=True)
class Packing:
    """What to pack.

    features, alignments   as the task takes them
    examples    chunks (windows with context) or utterances
    compress    one byte per value; uncompressed features are rounded, with a range per utterance and dimension
    block       examples per block, the unit of reading and of checksums; 0: a default by kind of example
    repeat      write every example N times: only for experiments with large archives
    """

    features: str
    alignments: str
    window: int = 21
    context: int = 0
    seed: int = 0
    examples: str = "chunks"
    compress: bool = True
    block: int = 0
    repeat: int = 1

    def __post_init__(self) -> None:
        if self.examples not in KINDS:
            raise UsageError(
                f"examples must be chunks or utterances (got '{self.examples}')",
                where="pack",
                hint=did_you_mean(str(self.examples), KINDS),
            )
        if self.window < 1 or self.context < 0 or self.block < 0 or self.repeat < 1:
            raise UsageError(
                "window and repeat must be >= 1, context and block >= 0 "
                f"(got {self.window}, {self.repeat}, {self.context}, {self.block})",
                where="pack",
            )

    @property
    def whole(self) -> bool:
        return self.examples == "utterances"


class PackSource:
    """Features and alignments, opened for packing."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing
        self.features, self.targets = from_spec(packing.features), Alignments.open(Path(packing.alignments))
        self.ids = matching_utterances(self.features, self.targets, packing.features)
        self._bytes = isinstance(self.features, FeatureStore) and packing.compress
        concatenated = isinstance(self.features, ConcatFeatures)
        self.layout = Layout(
            window=0 if packing.whole else packing.window,
            context=packing.context,
            dim=self.features.dim if isinstance(self.features, ConcatFeatures) else self.features.static_dim,
            deltas=0 if concatenated else getattr(self.features, "deltas", 0),
            compressed=packing.compress,
        )

    @cached_property
    def windows(self) -> windows.WindowIndex:
        frames = [self.features.frames(name) for name in self.ids]
        if not self.packing.whole:
            return windows.cut(frames, self.packing.window)
        zeros = np.zeros(len(frames), np.int64)
        return windows.WindowIndex(np.arange(len(frames)), zeros, zeros, 0)

    @property
    def samples(self) -> int:
        return len(self.windows) * self.packing.repeat

    @property
    def block(self) -> int:
        return self.packing.block or (UTTERANCE_BLOCK if self.packing.whole else CHUNK_BLOCK)

    @cached_property
    def order(self) -> np.ndarray:
        """Permutation of all examples."""
        return np.random.default_rng([self.packing.seed, SHUFFLE_STREAM]).permutation(self.samples)

    def metadata(self) -> ArchiveMetadata:
        features = configuration(self.features, self.targets)
        source = {"features": self.packing.features, "alignments": self.packing.alignments, "examples": self.packing.examples}
        return ArchiveMetadata(self.layout, self.packing.seed, self.block, features, self.targets.num_pdfs, source=source)

    def expected_bytes(self) -> float:
        """Return the approximate size of the archive."""
        layout, samples = self.layout, self.samples
        frames = float(
            self.features.total_frames * self.packing.repeat if self.packing.whole else samples * self.packing.window
        )
        stored = frames + samples * 2 * (layout.context + layout.reach)
        return (
            stored * layout.dim * (1 if layout.compressed else 4)
            + 4 * frames
            + samples * (16 + 8 * layout.dim * layout.compressed)
        )

    def encoded(self, number: int) -> writer.EncodedBlock:
        """Return one encoded block."""
        chosen = self.order[number * self.block : (number + 1) * self.block]
        examples = [self._example(int(index)) for index in chosen]
        values, ranges, targets, repeated = (list(part) for part in zip(*examples, strict=True))
        data, frames = encode(self.layout, chosen, np.array(repeated), values, ranges, targets)
        return writer.EncodedBlock(data, len(chosen), frames, int(sum((t != IGNORE).sum() for t in targets)))

    def _example(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, int]]:
        window = number % len(self.windows)
        name, start = self.ids[self.windows.utterance[window]], int(self.windows.start[window])
        values, ranges = self._stored(name)
        total = len(values)
        length = total if self.packing.whole else self.windows.length
        context, reach = self.layout.context, self.layout.reach
        at = np.arange(start - context - reach, start + length + context + reach)
        counted = np.arange(start, start + length)
        targets = np.full(length, IGNORE, np.int32)
        kept = (counted >= self.windows.counts_from[window]) & (counted < total)
        targets[kept] = self.targets[name][counted[kept]]
        repeated = max(0, context - start), max(0, start + length + context - total)
        return values[np.clip(at, 0, total - 1)], ranges, targets, repeated

    def _stored(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the static features of an utterance as the archive stores them, and their ranges."""
        if self._bytes:
            assert isinstance(self.features, FeatureStore)
            return self.features.quantized(name)
        x = self.features[name] if isinstance(self.features, ConcatFeatures) else self.features.static(name)
        if not self.packing.compress:
            return x, np.empty(0, np.float32)
        low, high = x.min(axis=0), x.max(axis=0)
        step = np.maximum((high - low) / np.float32(255), np.float32(1e-8))
        return np.rint((x - low) / step).astype(np.uint8), np.stack([low, step]).astype(np.float32)


def configuration(features: Any, targets: Alignments) -> dict[str, Any]:
    """Return what an archive must have in common with features and alignments: options, utterances, tied states."""
    lengths = json.dumps([[name, features.frames(name)] for name in features.ids]).encode()
    pdfs = targets._pdfs
    states = np.ascontiguousarray(pdfs[:: max(1, len(pdfs) // HASHED_FRAMES)]).tobytes()
    index = zlib.crc32((targets.folder / ALIGNMENTS_INDEX).read_bytes())
    return {
        **json.loads(json.dumps(features.configuration)),
        "utterances": f"{zlib.crc32(lengths):08x}",
        "alignments": f"{zlib.crc32(states, index):08x}",
    }


_sources: dict[Packing, PackSource] = {}


def _block(packing: Packing, number: int) -> writer.EncodedBlock:
    if packing not in _sources:
        _sources.clear()
        _sources[packing] = PackSource(packing)
    return _sources[packing].encoded(number)


def pack(
    packing: Packing,
    folder: Path,
    *,
    jobs: int = 1,
    progress: str = "auto",
    shard_bytes: int = writer.SHARD_BYTES,
) -> Archive:
    """Write an archive to `folder` and return it. Log its size and the rate."""
    began = time.monotonic()
    source = PackSource(packing)
    writer.require_free_space(folder, source.expected_bytes())
    numbers = range(-(-source.samples // source.block))
    blocks = process_map(partial(_block, packing), numbers, jobs=jobs, progress=progress, chunk=2)
    try:
        archive = writer.write(folder, source.metadata(), blocks, shard_bytes)
    finally:
        blocks.close()  # type: ignore[attr-defined]
        _sources.clear()
    seconds = max(time.monotonic() - began, 1e-9)
    size = sum(shard["bytes"] for shard in archive.metadata.shards)
    frames = archive.metadata.counted
    logger.info(
        f"{folder}: {len(archive):,} {packing.examples}, {frames:,} frames ({frames / 360_000:.2f} h), "
        f"{len(archive.metadata.shards)} shards, {size / 1e6:.1f} MB ({size / max(frames, 1):.0f} bytes per frame), "
        f"{seconds:.1f} s, {frames / seconds:,.0f} frames/s"
    )
    return archive


def archive_for(options: dict[str, Any], alignments: Path, *, jobs: int, progress: str) -> Path:
    """Return the archive of a task's features and alignments. Pack it if it is missing or belongs to other data."""
    packing = Packing(**{key: options[key] for key in ("features", "alignments", "window", "context")})
    folder = archive_dir(alignments)
    if (folder / INDEX).exists():
        source = PackSource(packing)
        try:
            features = configuration(source.features, source.targets)
            Archive(folder).require(features, source.targets.num_pdfs, packing.window, packing.context)
            return folder
        except DataError as error:
            logger.info("  packing again: %s", error.message)
    pack(packing, folder, jobs=jobs, progress=progress)
    return folder


def packing_of(run: Path, settings: dict[str, Any]) -> Packing:
    """Return what `roundelay pack RUN` packs: the training data of the run's network, changed by `settings`."""
    layout = RunLayout(run)
    training = layout.network() / run_files.CONFIG
    values: dict[str, Any] = {
        "features": str(layout.features("train")),
        "alignments": str(layout.alignments() / "train"),
    }
    if training.exists():
        options = config.load(training).settings.task_options
        values |= {key: options[key] for key in ("features", "alignments", "window", "context") if key in options}
    names = {field.name for field in fields(Packing)}
    for key in settings:
        if key not in names:
            raise UsageError(f"unknown key '{key}' for pack", where="pack", hint=did_you_mean(key, names))
    return Packing(**{**values, **settings})


def describe(archive: Archive) -> dict[str, Any]:
    """Return the metrics of an archive for --json."""
    about = archive.metadata
    size = sum(shard["bytes"] for shard in about.shards)
    return {
        "folder": str(archive.folder), "examples": about.examples, "frames": about.counted, "shards": len(about.shards),
        "blocks": len(archive.blocks), "bytes": size, "layout": asdict(about.layout), "features": about.features,
    }  # fmt: skip
