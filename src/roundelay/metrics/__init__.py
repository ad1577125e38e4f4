"""Metrics of a run: events, recorder, TensorBoard files and the live dashboard."""
