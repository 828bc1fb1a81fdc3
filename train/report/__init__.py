"""report.html of a training run: its results as figures, each with its PNG and CSV."""
