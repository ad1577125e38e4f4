"""The Python interface: `Session` for user loops, `fit` for the built-in training loop."""
