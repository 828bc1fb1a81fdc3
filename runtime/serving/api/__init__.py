"""Requests and answers of each API, all of them one internal request."""
