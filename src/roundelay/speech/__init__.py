"""Speech recognition: from recordings and transcripts to a word error rate."""
