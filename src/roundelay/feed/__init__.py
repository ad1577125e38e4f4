"""Feeding the learners: examples packed once into archives, and loaders that prepare the next ones while the current train."""
