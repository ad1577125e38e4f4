"""A cluster that exists only in virtual time: the same strategies and the same training loop, with a clock of its own."""
