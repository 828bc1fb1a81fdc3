"""Tools that measure, compare and convert; none of them is on the serving path."""
