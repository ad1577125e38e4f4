"""Packed training data: archives, their order per epoch, and background loading."""
