"""The server with other programs, under the arrivals of a public trace, and under attack."""
