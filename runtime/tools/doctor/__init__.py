"""Parts of `doctor`: model files, recorded routing, budgets and capacity."""
