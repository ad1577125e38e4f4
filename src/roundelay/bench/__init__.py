"""Tasks to measure with, and the benchmarks behind `roundelay bench`."""
