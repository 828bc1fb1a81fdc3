"""The simulator: the live runtime's own policy core, driven by a simulated clock."""
