"""Communicators: threads, torch.distributed, MPI; shared memory and gossip between them."""
