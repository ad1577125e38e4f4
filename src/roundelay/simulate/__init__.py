"""Training runs in virtual time: predict how long a run takes on a cluster, or train on one that does not exist."""
