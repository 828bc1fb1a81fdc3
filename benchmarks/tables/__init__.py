"""Tables of the READMEs, written from the committed results."""
