"""Work units on many processes or machines: one dispatcher, three engines that run its workers."""
