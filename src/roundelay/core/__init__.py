"""Contracts and building blocks of the engine: flat vectors, kernels, deferred updates, buckets, processes, interrupts."""
