"""Small real objects, made on demand."""
