"""Reports: read run directories and write one self-contained HTML page."""
