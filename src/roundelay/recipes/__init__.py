"""Speech recipes and the pipeline that runs them. The recipes of the package are folders here, looked up by name."""

from __future__ import annotations

from pathlib import Path

FILE = "recipe.toml"
FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Return the names of the recipes in the package."""
    return sorted(path.parent.name for path in FOLDER.glob(f"*/{FILE}"))
