"""Receivers of probes' events."""


class NoopListener:
    """Ignores every event: a base for listeners that need one or two."""

    def begin_step(self, *_: object) -> None:
        """Ignored."""

    def layer_input(self, *_: object) -> None:
        """Ignored."""

    def gate_input(self, *_: object) -> None:
        """Ignored."""

    def routed(self, *_: object) -> None:
        """Ignored."""

    def end_step(self, *_: object) -> None:
        """Ignored."""
