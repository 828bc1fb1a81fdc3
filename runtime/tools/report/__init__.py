"""Pages of results: one HTML file that needs nothing beside it, and each figure's PNG and CSV."""
