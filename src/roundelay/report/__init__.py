"""One page per run, or per comparison: read from run directories, written as one HTML file that needs nothing else."""
