"""All fuzz targets by name."""

from functools import partial

from tests.fuzz import checkpoint_files, option_values, zoo_files
from tests.fuzz.quantised_rows import compute
from tests.fuzz.request_bodies import poster
from tests.fuzz.routing_logs import import_log
from tests.fuzz.target import FuzzTarget
from tests.fuzz.trace_files import open_manifest

OPENED = {
    "zoo-manifest": zoo_files.open_manifest, "zoo-index": zoo_files.open_index,
    "zoo-lock": zoo_files.open_lockfile, "graph": zoo_files.open_graph,
    "predictor-options": zoo_files.open_predictor, "trace-manifest": open_manifest,
    "safetensors-header": checkpoint_files.open_header, "gguf-header": checkpoint_files.open_gguf,
    "model-config": checkpoint_files.open_config, "packed-manifest": checkpoint_files.open_packed,
    "weights-index": checkpoint_files.open_weights_index,
}  # fmt: skip
"""Files by target."""
POSTED = {
    "completion": "/v1/completions", "chat": "/v1/chat/completions", "responses": "/v1/responses",
    "messages": "/v1/messages", "tokenize": "/tokenize", "detokenize": "/detokenize",
}  # fmt: skip
"""The paths of requests by target."""

ALL = (
    *(FuzzTarget(name=name, parse=parse) for name, parse in OPENED.items()),
    FuzzTarget(name="quantised-rows", parse=compute, errors=(ValueError,)),
    FuzzTarget(name="routing-json", parse=partial(import_log, name="log.jsonl"), share=0.3),
    FuzzTarget(name="routing-csv", parse=partial(import_log, name="log.csv"), share=0.3),
    *(FuzzTarget(name=name, parse=poster(path), errors=()) for name, path in POSTED.items()),
    FuzzTarget(name="command-line", parse=option_values.read_command_line, share=0.1),
    FuzzTarget(name="option-file", parse=option_values.read_file, share=0.1),
)
TARGETS = {target.name: target for target in ALL}
