"""A model of real size with random weights, served from small budgets."""
