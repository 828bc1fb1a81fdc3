"""Parts of `doctor`: model files, recorded routing and budgets."""
