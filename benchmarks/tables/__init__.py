"""The README's tables, and those of `benchmarks/README.md`, from the committed results."""
