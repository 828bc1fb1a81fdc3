"""Limits of connections, bodies and rates, before a request is read."""
