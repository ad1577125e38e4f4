"""Who carries the vectors: threads, shared memory, torch.distributed, MPI."""
