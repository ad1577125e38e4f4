"""Coordination of the ranks of one job: the store and the membership."""
