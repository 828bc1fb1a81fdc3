"""Opens a trace that the user has named. Nothing is recorded into it: its name may be mistyped."""

from pathlib import Path

from collect.traces import Trace
from collect.traces.manifest import MANIFEST, has_manifest, read_manifest
from runtime.config import BUILTIN, ModelConfig
from train.errors import TrainError


def open_named_trace(named: str | Path, model: ModelConfig, *, key: str = "trace") -> Trace:
    """Opens the finished trace at a folder or address; messages call the option `key`.

    Raises:
        TrainError: there is none, or it is incomplete; the message says how to record it.
        TraceError: it is damaged.
    """
    source = "" if model.id == BUILTIN else f"model.id={model.id} "
    record = f"moecast collect {source}output={named}"
    without = f"Leave {key} out to record or reuse the trace of this model and data"
    if not has_manifest(named):
        parent, there = Path(named).parent, ""
        if names := sorted(path.parent.name for path in parent.glob(f"*/{MANIFEST}")):
            there = f" {parent} has {', '.join(names)}."
        raise TrainError(f"{key}={named} is not a trace.{there} {without}; {record} records one")
    if not read_manifest(named).complete:
        raise TrainError(
            f"{key}={named} is an incomplete trace. The command that recorded it continues it "
            f"({record}, with the same options). {without}"
        )
    return Trace.open(named)
