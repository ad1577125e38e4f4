"""Starting the ranks of a job, and connecting each of them to the others."""
