"""Work units on several processes or machines: one pool, three engines."""
