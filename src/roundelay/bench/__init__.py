"""Tasks to measure with, and the benchmarks behind `roundelay bench`."""

BENCHES = {
    "throughput": "roundelay.bench.throughput",
    "network": "roundelay.bench.network",
    "overhead": "roundelay.bench.overhead",
    "calibrate": "roundelay.bench.calibrate",
    "learning": "roundelay.bench.learning",
    "shapes": "roundelay.bench.shapes",
    "stragglers": "roundelay.bench.stragglers",
    "ksteps": "roundelay.bench.ksteps",
    "theory": "roundelay.bench.theory",
    "batches": "roundelay.bench.batches",
    "speech": "roundelay.recipe.strategies",
    "averaging": "roundelay.recipe.averaging",
    "feeding": "roundelay.recipe.feeding",
    "road": "roundelay.recipe.road",
}
"""Name on the command line -> where its `main` is."""
