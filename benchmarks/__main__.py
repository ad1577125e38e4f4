"""List the benchmarks."""

from __future__ import annotations

from benchmarks import BENCHES

print("\n".join(f"python -m benchmarks.{name:<18} {text}" for name, text in BENCHES.items()))
