"""Paths that tests need: the repository, and the real recordings next to it."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("ROUNDELAY_DATA", ROOT.parent / "shared" / "data"))
