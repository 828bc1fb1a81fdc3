"""Side-by-side runs against other programs and against the papers, with their committed results."""
