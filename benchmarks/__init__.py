"""Tasks to measure with, and the benchmarks behind `roundelay bench`."""

BENCHES = {
    "throughput": "benchmarks.throughput",
    "network": "benchmarks.network",
    "overhead": "benchmarks.overhead",
    "calibrate": "benchmarks.calibrate",
    "learning": "benchmarks.learning",
    "shapes": "benchmarks.published_scaling",
    "stragglers": "benchmarks.stragglers",
    "ksteps": "benchmarks.ksteps",
    "theory": "benchmarks.theory",
    "batches": "benchmarks.batches",
    "speech": "benchmarks.speech",
    "averaging": "benchmarks.averaging",
    "feeding": "benchmarks.feeding",
    "road": "benchmarks.speech_speed",
}
"""Name on the command line -> where its `main` is."""
