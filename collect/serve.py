"""`moecast serve`, with what records its requests."""

from functools import partial
from typing import Any

from runtime.commands import serve
from runtime.policy.budget import parse_size
from runtime.serving.config import ServeConfig


def run(config: ServeConfig) -> dict[str, Any]:
    """Serve until a signal, and record requests if `record` is set."""
    return serve.run(
        config,
        make_recorder=None if config.record is None else partial(make_recorder, config),
    )


def make_recorder(config: ServeConfig) -> Any:
    # Imported here: arrow takes memory, which a server that records nothing does not need.
    from collect.served.recorder import SignalSampler

    assert config.record is not None
    return SignalSampler(
        config.record,
        fraction=config.record_fraction,
        num_tokens=config.record_tokens,
        max_bytes=parse_size(config.record_bytes, name="record_bytes"),
    )
