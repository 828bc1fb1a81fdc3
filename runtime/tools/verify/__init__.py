"""Is what we serve exactly the model? Each side answers in a process of its own."""
