"""No reader ends in a traceback, hangs or runs anything, whatever is in its files.

ROUNDELAY_FUZZ=2000 reads 2000 damaged files with each reader; benchmarks/fuzz.py counts failures.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from readers import READERS, Reader, fuzz

CASES = int(os.environ.get("ROUNDELAY_FUZZ", "12"))


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_damaged_files_end_in_a_message(reader: Reader, tmp_path: Path) -> None:
    outcome = fuzz(reader, tmp_path, CASES)
    assert outcome.cases == CASES
    assert not outcome.tracebacks, "\n".join(outcome.tracebacks[:3])
    assert not outcome.hangs
    assert not outcome.executed
