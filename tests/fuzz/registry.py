"""All fuzz targets by name."""

from functools import partial

from tests.fuzz import (
    checkpoint_files,
    option_values,
    quantised_rows,
    request_bodies,
    trace_files,
    zoo_files,
)
from tests.fuzz.routing_logs import import_log
from tests.fuzz.target import FuzzTarget

TARGETS = {
    target.name: target
    for target in (
        FuzzTarget(name="zoo-manifest", parse=zoo_files.open_manifest),
        FuzzTarget(name="zoo-index", parse=zoo_files.open_index),
        FuzzTarget(name="zoo-lock", parse=zoo_files.open_lockfile),
        FuzzTarget(name="graph", parse=zoo_files.open_graph),
        FuzzTarget(name="predictor-options", parse=zoo_files.open_predictor),
        FuzzTarget(name="trace-manifest", parse=trace_files.open_manifest),
        FuzzTarget(name="safetensors-header", parse=checkpoint_files.open_header),
        FuzzTarget(name="gguf-header", parse=checkpoint_files.open_gguf),
        FuzzTarget(name="model-config", parse=checkpoint_files.open_config),
        FuzzTarget(name="weights-index", parse=checkpoint_files.open_weights_index),
        FuzzTarget(name="packed-manifest", parse=checkpoint_files.open_packed),
        FuzzTarget(name="quantised-rows", parse=quantised_rows.compute, errors=(ValueError,)),
        FuzzTarget(name="routing-json", parse=partial(import_log, name="log.jsonl"), share=0.3),
        FuzzTarget(name="routing-csv", parse=partial(import_log, name="log.csv"), share=0.3),
        FuzzTarget(name="completion", parse=request_bodies.poster("/v1/completions"), errors=()),
        FuzzTarget(name="chat", parse=request_bodies.poster("/v1/chat/completions"), errors=()),
        FuzzTarget(name="responses", parse=request_bodies.poster("/v1/responses"), errors=()),
        FuzzTarget(name="messages", parse=request_bodies.poster("/v1/messages"), errors=()),
        FuzzTarget(name="tokenize", parse=request_bodies.poster("/tokenize"), errors=()),
        FuzzTarget(name="detokenize", parse=request_bodies.poster("/detokenize"), errors=()),
        FuzzTarget(name="command-line", parse=option_values.read_command_line, share=0.1),
        FuzzTarget(name="option-file", parse=option_values.read_file, share=0.1),
    )
}
