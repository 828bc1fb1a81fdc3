"""Checks of a trace's content that digests cannot make: they can be computed anew after a change.

Each column is read once, in blocks. Shape suffixes: N rows of a shard, K top_k.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from collect.errors import TraceError
from collect.traces.layout import TraceSignal, column_name, signal_width
from collect.traces.manifest import TraceManifest, TracePlan, TraceRequest
from predictors.metrics import Phase

BLOCK_ELEMENTS = 1 << 20
"""Elements that are checked at once: two megabytes, which stay in a core's cache."""

EXPONENT = np.uint16(0x7C00)
"""Exponent bits of a half; all ones in infinity and NaN."""

AGAIN = "The trace was altered after it was recorded: collect it again into another folder"


def check_manifest(manifest: TraceManifest, path: str) -> None:
    """Checks that the signals fit the model and that each unit has one shard, in order.

    Raises:
        TraceError: the message names the signal, the unit or the file.
    """
    for fault in _manifest_faults(manifest):
        raise TraceError(f"{path}: {fault}. {AGAIN}")


def _manifest_faults(manifest: TraceManifest) -> Iterator[str]:
    plan, model = manifest.plan, manifest.plan.model
    if model.top_k > model.num_experts:
        yield f"top_k is {model.top_k}, the model has {model.num_experts} experts"
    for signal in plan.signals:
        if plan.signals.count(signal) > 1:
            yield f"the signal {signal} is listed twice"
        if not signal_width(signal, plan.spec):
            yield f"{signal} with hidden_size 0"
    units, num_units = [shard.unit for shard in manifest.shards], len(plan.units)
    if manifest.complete and units != [*range(num_units)]:
        shown = f"{', '.join(map(str, units[:8]))}{', ...' if len(units) > 8 else ''}"
        yield f"its shards are of the units {shown}; expected each of {num_units} once, in order"
    for name, count in Counter(record.name for record in manifest.files()).items():
        if count > 1:
            yield f"the file {name} is listed twice"


def check_requests(requests: Sequence[TraceRequest], path: str) -> None:
    """Checks that requests, ascending by index, are numbered from 0 without gaps or repetitions.

    Raises:
        TraceError: the message names the first index that is wrong.
    """
    for expected, request in enumerate(requests):
        if request.index != expected:
            raise TraceError(
                f"{path}: expected request {expected} in its lists of requests, got "
                f"{request.index}; requests are numbered from 0, each once. {AGAIN}"
            )


def check_tokens(
    arrays: Mapping[str, NDArray], requests: Sequence[TraceRequest], path: str, *, first_row: int
) -> None:
    """Checks the per-token columns of a shard against its requests.

    Rows are those of the requests, one request after another: its prompt, then the generated
    tokens, with ascending positions.

    Raises:
        TraceError: the message names the row and what was expected there.
    """
    ordered = sorted(requests, key=lambda request: request.index)
    num_rows = len(arrays["request"])
    listed = sum(request.prompt_tokens + request.generated_tokens for request in ordered)
    # Before the expected columns are made: a forged count may be beyond any memory.
    if listed != num_rows:
        raise TraceError(
            f"{path} has {num_rows:,} rows, its requests have {listed:,} tokens. {AGAIN}"
        )
    parts = np.array(
        [(request.prompt_tokens, request.generated_tokens) for request in ordered], np.int64
    ).reshape(-1, 2)
    expected_N = np.repeat([request.index for request in ordered], parts.sum(axis=1))
    phase_N = np.repeat(np.tile([Phase.PREFILL, Phase.DECODE], len(parts)), parts.reshape(-1))
    # Ascending in a request, which begins anywhere.
    least_N = np.zeros(num_rows, np.int64)
    least_N[1:] = arrays["position"][:-1].astype(np.int64) + 1
    least_N[np.diff(expected_N, prepend=-1) != 0] = 0
    for name, relation, values_N in (
        ("request", "", expected_N),
        ("phase", "", phase_N),
        ("position", "at least ", least_N),
        # -1: an imported log that does not know its tokens.
        ("token", "at least ", np.full(num_rows, -1)),
    ):
        right_N = arrays[name] >= values_N if relation else arrays[name] == values_N
        if not right_N.all():
            row = int(np.argmin(right_N))
            raise TraceError(
                f"{path}, row {first_row + row}: {name} is {arrays[name][row]}, expected "
                f"{relation}{values_N[row]}. {AGAIN}"
            )


def check_signals(
    arrays: Mapping[str, NDArray], plan: TracePlan, path: str, *, first_row: int
) -> None:
    """Checks a shard's signals: expert ids are the model's, all other numbers finite.

    The id `num_experts` stands for a choice of none and may occur several times in a row.

    Raises:
        TraceError: the message names the row, its request and the layer.
    """
    for signal in plan.signals:
        for layer in range(plan.spec.num_layers):
            values = arrays[column_name(signal, layer)]
            step = max(1, BLOCK_ELEMENTS // values.shape[1])
            for first in range(0, len(values), step):
                block = values[first : first + step]
                fault = (
                    _find_bad_experts(block, plan.spec.num_experts)
                    if signal is TraceSignal.EXPERTS
                    else _find_infinite(block)
                )
                if fault is not None:
                    row, what = first + fault[0], fault[1]
                    raise TraceError(
                        f"{path}, row {first_row + row} (request {arrays['request'][row]}, "
                        f"position {arrays['position'][row]}), layer {layer}: {signal} {what}. "
                        f"{AGAIN}"
                    )


def _find_bad_experts(ids_NK: NDArray[np.int16], num_experts: int) -> tuple[int, str] | None:
    """Returns the first row with an impossible or repeated id, and what is wrong with it."""
    if ids_NK.min() < 0 or ids_NK.max() > num_experts:
        row = int(np.argmax(((ids_NK < 0) | (ids_NK > num_experts)).any(axis=1)))
        bad = [int(e) for e in ids_NK[row] if not 0 <= e <= num_experts]
        return row, f"has {bad[0]}; ids run from 0 to {num_experts - 1}"
    # A column for each choice: comparing whole columns is far faster than sorting rows.
    choices_KN = np.ascontiguousarray(ids_NK.T)
    for shift in range(1, len(choices_KN)):
        later_KN = choices_KN[shift:]
        same_KN = (later_KN == choices_KN[:-shift]) & (later_KN < num_experts)
        if same_KN.any():
            row = int(np.argmax(same_KN.any(axis=0)))
            return row, f"has an id twice: {ids_NK[row].tolist()}"
    return None


def _find_infinite(block: NDArray[np.float16]) -> tuple[int, str] | None:
    """Returns the first row with infinity or NaN, and what is wrong with it."""
    if is_finite(block):
        return None
    row = int(np.argmin(np.isfinite(block).all(axis=1)))
    return row, f"has {block[row][~np.isfinite(block[row])][0]}, which is not finite"


def is_finite(half: NDArray[np.float16]) -> bool:
    """Returns whether no value is infinity or NaN; ten times as fast as `isfinite` on halves."""
    return not half.size or (half.view(np.uint16) & EXPONENT).max() != EXPONENT
