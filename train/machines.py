"""The machines of simulated replays."""

from collections.abc import Sequence

from runtime.config import HardwareConfig, ModelConfig, ShapeConfig
from runtime.sim.hardware import Hardware, describe_hardware


def describe_machines(
    configs: Sequence[HardwareConfig], shape: ShapeConfig, model: ModelConfig
) -> list[Hardware]:
    """Return each describe_hardware machine with experts of the shape's size.

    The model is loaded for `shape=trace` and for machines that are measured, once for each.
    """
    if shape.is_own and not all(config.measured for config in configs):
        from runtime.profiling.shapes import read_model_shape

        shape = read_model_shape(model)
    measured = measure_machine(model) if any(config.measured for config in configs) else None
    return [
        measured if config.measured and measured else describe_hardware(config, shape)
        for config in configs
    ]


def measure_machine(model: ModelConfig) -> Hardware:
    """Load the model and return the times of this machine with it."""
    from runtime.engine.loading import load
    from runtime.profiling.local import measure

    loaded = load(model)
    try:
        return measure(loaded)
    finally:
        loaded.moecast.close()
