"""Hybrid speech recognition: corpora, features, GMM-HMM training, decoding graphs, networks, decoding, scoring."""
