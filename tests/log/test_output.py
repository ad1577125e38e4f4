"""Standard streams whose readers are gone, and errors that must not be hidden."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import sys
from roundelay.log.output import surviving_output
with surviving_output():
    print("result", "ü")
    print("message", file=sys.stderr, flush=True)
    print("result" * 10000, flush=True)
open(sys.argv[1], "w").close()
"""


def run(*args: str, **streams: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT, *args], text=True, timeout=60, check=False, **streams)


def test_output_without_a_reader_is_dropped(tmp_path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    ended = run(str(tmp_path / "end"), stdout=write_end, stderr=write_end)
    os.close(write_end)
    assert ended.returncode == 0
    assert (tmp_path / "end").exists()


def test_output_arrives(tmp_path) -> None:
    ended = run(str(tmp_path / "end"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert ended.stdout == "result ü\n" + "result" * 10000 + "\n"
    assert ended.stderr == "message\n"


def test_a_full_disk_is_an_error_for_results_and_none_for_messages(tmp_path) -> None:
    with open("/dev/full", "w") as full:
        results = run(str(tmp_path / "end"), stdout=full.fileno(), stderr=subprocess.PIPE)
        assert results.returncode != 0
        assert "No space left" in results.stderr
        messages = run(str(tmp_path / "end"), stdout=subprocess.PIPE, stderr=full.fileno())
    assert messages.returncode == 0
    assert messages.stdout.startswith("result")
