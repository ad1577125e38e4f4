"""Roundelay: distributed training in which learners talk to their neighbours, one step behind."""

__version__ = "0.1.0"
