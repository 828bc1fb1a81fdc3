"""Memory of fixed size and the link that fills it."""

from runtime.compiled import extend_path

__path__ = extend_path(__path__, __name__)
