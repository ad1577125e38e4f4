"""Synthesize a speech corpus: sentences of a small grammar, many voices of espeak-ng, and noisy telephone lines."""
