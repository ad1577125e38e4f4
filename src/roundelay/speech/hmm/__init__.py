"""GMM-HMM models: lexicon, training, forced alignment, speaker adaptation."""
