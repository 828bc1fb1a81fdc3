"""Live comparison of systems on this machine."""
