"""Several replicas of a server behind Ray Serve: `python -m runtime serve launcher=ray`."""
