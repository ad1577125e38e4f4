"""Background exchanges of weights: the gossip thread, its handle and its connections."""
