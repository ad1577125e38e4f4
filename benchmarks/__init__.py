"""Benchmarks of the repository: paper reproductions and measurements. Run one with `python -m benchmarks.NAME`."""

BENCHES = {
    "averaging": "how often to average, and its cost in three systems (needs the run of a recipe)",
    "batches": "the largest batch that each strategy bears, with learning in virtual time",
    "calibrate": "measure this machine into cluster files and compare predictions with runs",
    "cpu_per_step": "CPU seconds per step of this tree against another checkout",
    "feeding": "rate and memory of archives and loaders",
    "frozen": "what a stopped learner costs the remaining ones",
    "kill_calls": "SIGKILL at each store call of a learner",
    "kill_matrix": "SIGKILL in every phase of a run, for every strategy",
    "ksteps": "K-step averaging with learning in virtual time",
    "learning": "held-out loss of every strategy against one learner, equal samples",
    "many_learners": "128 learners of a tiny model start, train and leave",
    "network": "seconds to the same loss between machines on a slow network (needs root)",
    "network_faults": "vanished machines, resets, delay, loss on three machines (needs root)",
    "overhead": "cost of one exchange and one mean, and the buffers of each strategy",
    "published_scaling": "published speed-ups on simulated clusters",
    "speech": "word error rate of every strategy on the run of a recipe",
    "speech_speed": "speed of the stages of the speech pipeline on one core",
    "stragglers": "loss against virtual time with one slow learner",
    "straggler_tail": "seconds of a run with one slow learner against the ideal",
    "theory": "exponents of the convergence theorems and contraction against the engine",
    "throughput": "samples/s of all strategies and of torch's own methods",
    "time_sliced": "held-out loss with more learners than cores, on the demo's features",
    "vswitch": "machines on a switch with delay, loss, cut cables, resets (needs root)",
}
"""Module -> one-line help. Every module is a command with --json."""
