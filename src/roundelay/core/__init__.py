"""The words the engine is written in: flat vectors, workers, nets, tasks, events."""
