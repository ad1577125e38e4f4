"""Example settings for `roundelay train`, by name."""

from __future__ import annotations

from pathlib import Path

from roundelay.errors import UsageError, did_you_mean

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Return the names of the examples."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find(name: str | Path) -> Path:
    """Return the path of a settings file: an existing file, or an example by name.

    Raises:
        UsageError: There is neither.
    """
    path = Path(name)
    if path.is_file():
        return path
    if str(name) in names():
        return FOLDER / f"{name}.toml"
    if path.suffix == ".toml" or path.exists():
        return path  # the loader reports why it cannot be read
    raise UsageError(
        f"cannot read {name}: there is no such file or example",
        where="FILE",
        hint=f"{did_you_mean(str(name), names())} or give the path of a TOML file (roundelay list examples)",
    )


def describe(name: str) -> str:
    """Return the first comment line of an example."""
    return find(name).read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
