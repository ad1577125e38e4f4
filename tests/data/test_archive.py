"""Archives hold the features exactly, every example once, and damaged files are detected."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import Jobs
from hypothesis import given
from hypothesis import strategies as st
from packed import PDFS, corpus, packed
from paths import ROOT

from roundelay.data.archive import IGNORE, INDEX, Archive
from roundelay.data.collate import Perturbation
from roundelay.data.epoch_order import EpochOrder
from roundelay.data.examples import Examples
from roundelay.data.writer import require_free_space
from roundelay.errors import DataError
from roundelay.recipes.pack import Packing, pack
from roundelay.recipes.packed_task import PackedTask
from roundelay.speech.features import windows
from roundelay.speech.nnet.frame_task import FrameTask

SHAPE: dict[str, Any] = {"window": 21, "context": 6, "model": "tiny", "hidden": 4, "bottleneck": 3}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def archive(inputs: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(tmp_path_factory.mktemp("packed") / "archive", inputs, shard_bytes=20_000)


def copy_of(archive: Path, folder: Path) -> Path:
    return Path(shutil.copytree(archive, folder / "copy"))


# --------------------------------------------------------------------------------------------------- content


@pytest.mark.parametrize("deltas", [0, 1, 2])
def test_an_archive_delivers_the_bits_of_the_feature_store(tmp_path: Path, deltas: int) -> None:
    inputs = corpus(tmp_path, deltas=deltas)
    plain = FrameTask(**inputs, **SHAPE)
    whole = PackedTask(archive=str(packed(tmp_path / "archive", inputs)), **inputs, **SHAPE)
    assert whole.samples == plain.samples
    for start in range(0, whole.samples, 10):
        batch = whole.examples.batch(3, start, min(start + 10, whole.samples))
        x, y = windows.gather(plain.windows, batch.numbers, plain.ids, plain, plain._targets, 6)
        assert np.array_equal(batch.x, x)
        assert np.array_equal(batch.y, y)


def test_masks_fall_on_the_same_windows_with_and_without_an_archive(inputs: dict[str, str], archive: Path) -> None:
    masks = {"spec_augment_freq": 3, "spec_augment_time": 5}
    plain, whole = FrameTask(**inputs, **SHAPE, **masks), PackedTask(archive=str(archive), **inputs, **SHAPE, **masks)
    x, _ = whole.batch(1, 0, whole.samples)
    rows = {int(n): row for row, n in enumerate(whole.examples.batch(1, 0, whole.samples).numbers)}
    order = windows.order(0, 1, plain.samples)
    expected, _ = plain.batch(1, 0, plain.samples)
    assert all(np.array_equal(x[rows[int(n)]], expected[place]) for place, n in enumerate(order))


def test_whole_utterances_are_padded_to_the_longest(inputs: dict[str, str], tmp_path: Path) -> None:
    folder = packed(tmp_path / "archive", inputs, examples="utterances", context=2, block=4)
    task = PackedTask(archive=str(folder), **inputs, **{**SHAPE, "context": 2})
    seen = []
    for start in range(0, task.samples, 5):
        example_batch = task.examples.batch(0, start, min(start + 5, task.samples))
        for row, number in enumerate(example_batch.numbers):
            name = task._features.ids[number]
            inside = slice(2, example_batch.lengths[row] - 2)
            assert np.array_equal(example_batch.x[row, inside], task._features[name])
            assert np.array_equal(example_batch.y[row, inside], task._targets[name])
            assert (np.delete(example_batch.y[row], np.r_[inside]) == IGNORE).all()
        seen += example_batch.numbers.tolist()
    assert sorted(seen) == list(range(task.samples))
    batch = task.batch(0, 0, 5)
    assert float(task.loss(task.build(), batch).detach()) > 0


def test_uncompressed_values_are_the_features_themselves(inputs: dict[str, str], tmp_path: Path) -> None:
    x = [Examples(packed(tmp_path / str(c), inputs, compress=c)).batch(0, 0, 20).x for c in (True, False)]
    assert np.allclose(x[0], x[1], atol=1e-6)
    sizes = [Archive(tmp_path / str(c)).blocks[:, 2].sum() for c in (True, False)]
    assert sizes[1] > 2 * sizes[0]


def test_other_processes_pack_the_same_archive(inputs: dict[str, str], archive: Path, tmp_path: Path) -> None:
    wanted = Packing(features=inputs["features"], alignments=inputs["alignments"], window=21, context=6, block=8)
    other = pack(wanted, tmp_path / "two", jobs=2, progress="none", shard_bytes=20_000).folder
    assert [(p.name, p.read_bytes()) for p in sorted(other.iterdir())] == [
        (p.name, p.read_bytes()) for p in sorted(archive.iterdir())
    ]


# ------------------------------------------------------------------------------------------------------------ order


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 7), st.integers(0, 3))
def test_an_epoch_has_every_example_once_for_any_batch_size(sizes: list[int], mix: int, batch: int, epoch: int) -> None:
    total = sum(sizes)
    whole = EpochOrder(sizes, 5, epoch, mix)
    blocks, rows = whole.at(0, total)
    assert sorted(zip(blocks.tolist(), rows.tolist(), strict=True)) == [(b, r) for b, n in enumerate(sizes) for r in range(n)]
    cut = EpochOrder(sizes, 5, epoch, mix)
    pieces = [cut.at(start, min(start + batch, total)) for start in range(0, total, batch)]
    assert np.array_equal(np.concatenate([p[0] for p in pieces]), blocks)
    assert np.array_equal(np.concatenate([p[1] for p in pieces]), rows)


def test_epochs_and_seeds_differ(archive: Path) -> None:
    orders = [Examples(archive, seed).batch(epoch, 0, 40).numbers.tolist() for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert orders[0] == orders[3]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]


# ---------------------------------------------------------------------------------------------------- perturbation


def test_speed_and_noise_are_functions_of_the_example_and_epoch(archive: Path) -> None:
    plain = Examples(archive).batch(2, 0, 16)
    for change in (Perturbation(speed=0.2), Perturbation(noise=0.5)):
        one, two = (Examples(archive, 0, change) for _ in range(2))
        two.batch(2, 9, 30)
        again = two.batch(2, 5, 9)
        assert np.array_equal(one.batch(2, 0, 16).x[5:9], again.x)
        assert not np.array_equal(again.x, plain.x[5:9])
        assert not np.array_equal(one.batch(2, 0, 16).x, one.batch(3, 0, 16).x)


def test_noise_has_the_requested_deviation(archive: Path) -> None:
    total = len(Archive(archive))
    noisy, plain = (Examples(archive, 0, Perturbation(noise=n)).batch(0, 0, total).x[..., :8] for n in (0.5, 0.0))
    added = (noisy - plain).ravel()
    assert abs(added.std() / 0.5 - 1) < 5 / np.sqrt(2 * added.size) + 0.02  # five standard errors; repeated edge frames
    assert abs(added.mean()) < 0.02


def test_a_slower_example_keeps_its_middle_and_targets_follow(archive: Path) -> None:
    change = Perturbation(speed=0.3)
    warped, plain = Examples(archive, 0, change).batch(0, 0, 16), Examples(archive, 0).batch(0, 0, 16)
    middle = 6 + 10
    assert np.array_equal(warped.y[:, middle], plain.y[:, middle])
    assert np.allclose(warped.x[:, middle, :8], plain.x[:, middle, :8], atol=1e-5)
    assert (warped.y < PDFS).all()


# ------------------------------------------------------------------------------------------------------- bad input


def test_a_truncated_shard_is_named(archive: Path, tmp_path: Path) -> None:
    folder = copy_of(archive, tmp_path)
    shard = sorted(folder.glob("shard-*"))[1]
    os.truncate(shard, shard.stat().st_size - 10)
    with pytest.raises(DataError, match=r"shard-00001\.bin[\s\S]*its size must be"):
        Archive(folder)


def test_a_shard_cut_while_it_is_read_is_named(archive: Path, tmp_path: Path) -> None:
    folder = copy_of(archive, tmp_path)
    opened = Archive(folder)
    os.truncate(sorted(folder.glob("shard-*"))[0], 100)
    with pytest.raises(DataError, match=r"shard-00000\.bin"):
        opened.block(0)


def test_an_altered_byte_is_found_and_its_shard_named(archive: Path, tmp_path: Path) -> None:
    folder = copy_of(archive, tmp_path)
    opened = Archive(folder)
    last = opened.blocks[-1]
    shard = folder / opened.metadata.shards[int(last[0])]["file"]
    with shard.open("r+b") as file:
        file.seek(int(last[1]) + int(last[2]) // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(DataError, match=rf"{shard.name}[\s\S]*checksum of block {len(opened.blocks) - 1}"):
        Archive(folder).verify()
    examples = Examples(folder)
    with pytest.raises(DataError, match=shard.name):
        examples.batch(0, 0, len(examples))


def test_a_missing_shard_and_a_damaged_index_are_named(archive: Path, tmp_path: Path) -> None:
    folder = copy_of(archive, tmp_path)
    shutil.move(folder / "shard-00000.bin", tmp_path / "away")
    with pytest.raises(DataError, match=r"shard-00000\.bin[\s\S]*missing"):
        Archive(folder)
    shutil.move(tmp_path / "away", folder / "shard-00000.bin")
    table = bytearray((folder / "blocks.npy").read_bytes())
    table[-3] ^= 1
    (folder / "blocks.npy").write_bytes(table)
    with pytest.raises(DataError, match="table of blocks is damaged"):
        Archive(folder)
    (folder / INDEX).write_text("{")
    with pytest.raises(DataError, match="reading the archive failed"):
        Archive(folder)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"deltas": 1}, "deltas"), ({"low_hz": 100.0}, "low_hz"), ({"cmvn": "none"}, "cmvn")],
)
def test_an_archive_of_other_features_is_refused(archive: Path, tmp_path: Path, change: dict[str, Any], named: str) -> None:
    other = corpus(tmp_path, **change)
    with pytest.raises(DataError, match=rf"another configuration: .*{named} must be"):
        PackedTask(archive=str(archive), **other, **SHAPE)


def test_an_archive_of_other_windows_or_utterances_is_refused(inputs: dict[str, str], archive: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"context must be 3 \(got 6\)"):
        PackedTask(archive=str(archive), **inputs, **{**SHAPE, "context": 3})
    fewer = corpus(tmp_path / "fewer", utterances=29)
    with pytest.raises(DataError, match="utterances must be"):
        PackedTask(archive=str(archive), **fewer, **SHAPE)
    states = np.load(Path(fewer["alignments"]) / "pdfs.npy")
    own = packed(tmp_path / "own", fewer)
    np.save(Path(fewer["alignments"]) / "pdfs.npy", (states + 1) % PDFS)
    with pytest.raises(DataError, match="alignments must be"):
        PackedTask(archive=str(own), **fewer, **SHAPE)


FULL = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, {support!r})
from packed import packed
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
from roundelay.errors import DataError
try:
    packed(Path({out!r}), {inputs!r})
except DataError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def test_a_full_disk_while_packing_leaves_no_partial_archive(inputs: dict[str, str], tmp_path: Path) -> None:
    """A limit on file sizes makes a write fail in the middle of a shard, as on a full disk."""
    out = tmp_path / "out" / "archive"
    out.mkdir(parents=True)
    (out / "before").write_text("stays until the new archive is complete")
    support = str(ROOT / "tests" / "support")
    code = FULL.format(support=support, out=str(out), inputs=inputs)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 3, ended.stderr
    assert "writing the archive failed" in ended.stdout
    assert "the incomplete archive was deleted" in ended.stdout
    assert [p.name for p in out.parent.iterdir()] == ["archive"]
    assert [p.name for p in out.iterdir()] == ["before"]


def test_too_little_free_space_is_reported_before_packing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="of free space"):
        require_free_space(tmp_path / "not" / "yet", 1e18)


def test_the_command_packs_and_verifies(inputs: dict[str, str], jobs: Jobs) -> None:
    options = [f"features={inputs['features']}", f"alignments={inputs['alignments']}", "context=6", "block=8"]
    ended = jobs.run("pack", "archive", *options, "--verify", "--jobs", "1", "--json").expect(0)
    assert ended.json["examples"] == len(Archive(jobs.folder / "archive"))
    assert "frames/s" in ended.err
    assert "all block checksums verified" in ended.err
    assert "window" in jobs.run("pack", "archive", *options, "windows=3").expect(2).err
