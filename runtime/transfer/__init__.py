"""Memory of fixed size and the link that fills it."""
