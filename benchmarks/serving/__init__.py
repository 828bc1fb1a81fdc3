"""The server under load, clients that leave, signals and noise; other programs as its clients."""
