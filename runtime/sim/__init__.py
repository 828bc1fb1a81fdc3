"""The simulator: the live runtime's own policy core, driven by a simulated clock."""

from runtime.compiled import extend_path

__path__ = extend_path(__path__, __name__)
