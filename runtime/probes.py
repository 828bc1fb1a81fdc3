"""Where recorders find the probes."""

from runtime.hf.probes import Listener, Probes

__all__ = ["Listener", "Probes"]
