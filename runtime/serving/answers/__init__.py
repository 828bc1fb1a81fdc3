"""Forms in which models write an answer: reasoning, content and calls of tools."""
