"""The manifest of a checkpoint, meta.json: written with its own checksum, and validated before anything in it is used."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from roundelay.core.files import digest
from roundelay.errors import DataError, RoundelayError

FORMAT = 2
MANIFEST, BEST = "meta.json", "best.json"
HINT = "choose another checkpoint, or set resume=auto to use the latest intact one"
LIMIT = 2**62
"""Positions and sizes are below this number."""
MAX_RANKS = 1_000_000
FILE_NAME = re.compile(r"rank-\d{3,7}\.(json|safetensors)|model\.safetensors")

logger = logging.getLogger(__name__)


def folder_name(position: int) -> str:
    """Return the name of the checkpoint at `position` global samples; names sort by position."""
    return f"samples-{position:012d}"


def checksum(meta: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its field `sha256`, in canonical JSON."""
    content = {key: value for key, value in meta.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def seal(meta: dict[str, Any]) -> str:
    """Return the text of a manifest with its checksum."""
    meta = json.loads(json.dumps(meta))  # as a reader will see it: tuples are lists, keys are strings
    return json.dumps({**meta, "sha256": checksum(meta)}, indent=1)


@contextmanager
def damage_as_data_error(path: Path) -> Iterator[None]:
    """Raise whatever a damaged or hostile checkpoint causes inside the block as DataError."""
    try:
        yield
    except RoundelayError:
        raise
    except FileNotFoundError as error:
        raise DataError(
            f"{Path(error.filename or '').name} is missing from the checkpoint", where=str(path), hint=HINT
        ) from error
    except Exception as error:
        cause = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise DataError(f"reading the checkpoint failed: {cause}", where=str(path), hint=HINT) from error


def read_manifest(path: Path) -> dict[str, Any]:
    """Check and return the manifest of a checkpoint, without a look at its files. Raises DataError if anything is wrong."""
    with damage_as_data_error(path):
        meta = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version = meta.get("format") if isinstance(meta, dict) else None
        if not isinstance(meta, dict) or version != FORMAT:
            raise DataError(
                f"the checkpoint must have format {FORMAT} (got {str(version)[:50]})",
                where=str(path),
                hint="use the version of roundelay that wrote it, or choose another checkpoint",
            )
        if meta.get("sha256") != checksum(meta):
            raise DataError(f"{MANIFEST} is damaged: wrong checksum", where=str(path), hint=HINT)
        validate(meta, path)
        return meta


def verify(path: Path) -> dict[str, Any]:
    """Check the manifest, sizes and checksums of a checkpoint; return the manifest. Raises DataError if anything is wrong."""
    with damage_as_data_error(path):
        meta = read_manifest(path)
        for name, entry in meta["files"].items():
            file = path / name
            if not file.is_file():
                raise DataError(f"{name} is missing from the checkpoint", where=str(path), hint=HINT)
            if file.stat().st_size != entry["bytes"] or digest(file) != entry["sha256"]:
                raise DataError(f"{name} is damaged: wrong size or checksum", where=str(file), hint=HINT)
        return meta


def validate(meta: dict[str, Any], path: Path) -> None:
    """Raise DataError if a field of the manifest is missing or has a wrong type or range."""

    def require(ok: bool, field: str) -> None:
        if not ok:
            raise DataError(f"{MANIFEST}: the field '{field}' is missing or invalid", where=str(path), hint=HINT)

    def ranks(field: str) -> list[int]:
        value: Any = meta.get(field)
        require(isinstance(value, list) and 0 < len(value) <= meta["size"], field)
        require(all(is_count(r) and r < meta["size"] for r in value) and sorted(set(value)) == value, field)
        return list(value)

    require(is_count(meta.get("position")), "position")
    require(is_count(meta.get("size")) and 0 < meta["size"] <= MAX_RANKS, "size")
    leaders = ranks("node_leaders")
    require(set(leaders) <= set(ranks("ranks")), "node_leaders")
    require(meta.get("sharding") in ("static", "dynamic"), "sharding")
    require(is_ranges(meta.get("completed")), "completed")
    files: Any = meta.get("files")
    require(isinstance(files, dict) and all(FILE_NAME.fullmatch(name) for name in files), "files")
    require(
        all(isinstance(e, dict) and is_count(e.get("bytes")) and isinstance(e.get("sha256"), str) for e in files.values()),
        "files",
    )
    needed = {"model.safetensors"} | {f"rank-{r:03d}.{kind}" for r in meta["ranks"] for kind in ("json", "safetensors")}
    require(needed <= set(files), "files")


def is_count(value: Any) -> bool:
    """Return whether a value is an integer that can be a position or a size."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LIMIT


def is_ranges(value: Any) -> bool:
    """Return whether a value is a list of [start, stop] with start < stop."""
    return isinstance(value, list) and all(
        isinstance(s, list) and len(s) == 2 and is_count(s[0]) and is_count(s[1]) and s[0] < s[1] for s in value
    )


def latest(folder: Path, log: Callable[[str], None] = logger.warning) -> Path | None:
    """Return the latest intact checkpoint, or None. Damaged ones are skipped and logged."""
    for path in sorted((p for p in folder.glob("samples-*") if p.is_dir()), reverse=True):
        try:
            verify(path)
        except DataError as error:
            log(f"skipping a damaged checkpoint: {error.message} ({path.name})")
            continue
        return path
    return None


def read_best(folder: Path) -> dict[str, Any] | None:
    """Return the content of best.json, or None if it is missing or damaged."""
    try:
        note = json.loads((folder / BEST).read_text(encoding="utf-8"))
        if is_count(note["position"]) and isinstance(note["metric"], str) and isinstance(note["value"], int | float):
            return dict(note)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def best(folder: Path) -> Path:
    """Return the best checkpoint of a run. Raises DataError if best.json does not name one."""
    note = read_best(folder)
    path = folder / folder_name(note["position"]) if note is not None else None
    if path is None or not path.is_dir():
        raise DataError(
            "the run has no best checkpoint", where=str(folder / BEST), hint="set resume=auto to use the latest checkpoint"
        )
    return path
