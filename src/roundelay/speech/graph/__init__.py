"""Decoding graphs: n-gram models, FSTs, HCLG."""
