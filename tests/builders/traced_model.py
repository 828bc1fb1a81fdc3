"""A tiny model in a folder, with traces that are bound to it."""

from pathlib import Path

from runtime.config import ModelConfig
from runtime.store.model_source import identity
from tests.builders.models import tiny_qwen2_moe
from tests.builders.traces import make_spec, make_trace


def make_traced_model(
    folder: Path, *, other: str | None = None, num_units: int = 2, requests_per_unit: int = 60
) -> Path:
    """Writes `tiny` and `trace` into the folder, and a trace `other` of another distribution.

    Returns the model's folder.
    """
    model = tiny_qwen2_moe(folder / "tiny", num_layers=4)
    spec = make_spec(hidden_size=32)
    config = ModelConfig(name="tiny", id=str(model), dtype="float32")
    spec = type(spec)(**{**spec.as_dict(), **identity(model, config)})
    sizes = {"num_units": num_units, "requests_per_unit": requests_per_unit}
    make_trace(folder / "trace", spec=spec, **sizes)
    if other is not None:
        make_trace(folder / other, spec=spec, num_units=1, seed=1)
    return model


def training_options(folder: Path, run_dir: Path) -> list[str]:
    """Returns options of `moecast train` on them, for seconds; later ones replace them."""
    return [
        *(f"model.id={folder / 'tiny'}", "model.name=tiny", f"trace={folder / 'trace'}"),
        *(f"run_dir={run_dir}", "predictor.width=32", "max_epochs=2", "batch_size=64"),
        "replay_tokens=10",
    ]
