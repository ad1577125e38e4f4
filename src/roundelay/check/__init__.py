"""roundelay check: will a run work here, and what would it use?

Alone it looks at this machine. With learners=N, or under torchrun, all ranks meet at the store as a run would and also measure
what lies between them: bandwidth, round trips, clocks. Every finding is ok, a warning, or a failure with what to do about it.
"""
