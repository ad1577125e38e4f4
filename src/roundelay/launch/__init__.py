"""Starting the ranks of a job, and connecting them."""
