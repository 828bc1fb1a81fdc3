"""HTML reports: one self-contained file, with a PNG and a CSV of each figure."""
