"""Chat in the terminal: `moecast chat`."""
