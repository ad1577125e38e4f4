"""Benchmarks of the repository: paper reproductions and measurements. Run one with `python -m benchmarks.NAME`."""

BENCHES = {
    "averaging": "how often to average, and its cost in three systems (needs the run of a recipe)",
    "batches": "the largest batch that each strategy bears, with learning in virtual time",
    "calibrate": "measure this machine into cluster files and compare predictions with runs",
    "feeding": "rate and memory of archives and loaders",
    "ksteps": "K-step averaging with learning in virtual time",
    "learning": "held-out loss of every strategy against one learner, equal samples",
    "network": "seconds to the same loss between machines on a slow network (needs root)",
    "overhead": "cost of one exchange and one mean, and the buffers of each strategy",
    "published_scaling": "published speed-ups on simulated clusters",
    "speech": "word error rate of every strategy on the run of a recipe",
    "speech_speed": "speed of the stages of the speech pipeline on one core",
    "stragglers": "loss against virtual time with one slow learner",
    "theory": "exponents of the convergence theorems and contraction against the engine",
    "throughput": "samples/s of all strategies and of torch's own methods",
}
"""Module -> one-line help. Every module is a command with --json."""
