"""The training engine: learner, training loop, sharding, checkpoints, evaluation."""
