"""Replay: repeat a recorded asynchronous run to the same weights."""
