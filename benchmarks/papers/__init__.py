"""Numbers that the papers publish, next to replays of the same shapes, links and budgets."""
