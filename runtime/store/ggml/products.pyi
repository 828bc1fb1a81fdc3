def open(path: str, num_types: int, /) -> None:
    """Opens ggml's library.

    Raises:
        OSError: It cannot be loaded, or is another library.
    """

def describe(number: int, /) -> tuple[str, int, int, bool, bool, bool] | None:
    """Returns a type's name, the weights and bytes of a block, and what the library does with it.

    That is whether it multiplies, decodes and encodes.
    """

Parts = tuple[tuple[int, int, int], ...]
"""Number of the type, offset in the slot and number of rows of each part of a matrix."""

def multiply(
    parts: Parts,
    num_columns: int,
    slots: list[int],
    pairs: list[list[int]],
    top_k: int,
    num_tokens: int,
    x_TD: int,
    results_PN: int,
    num_threads: int,
    /,
) -> None: ...
def compute(
    up: Parts,
    hidden_size: int,
    down: Parts,
    slots: list[int],
    pairs: list[list[int]],
    top_k: int,
    num_tokens: int,
    x_TD: int,
    results_PD: int,
    num_threads: int,
    /,
) -> None: ...
def add_up(
    results_PD: int,
    weights_TK: int,
    ids_TK: int,
    num_experts: int,
    num_tokens: int,
    top_k: int,
    hidden_size: int,
    sums_TD: int,
    /,
) -> None: ...
def decode(
    number: int, num_rows: int, num_columns: int, rows: int, weights: int, num_threads: int, /
) -> None: ...
def encode(
    number: int, num_rows: int, num_columns: int, weights: int, rows: int, num_threads: int, /
) -> None: ...
def multiply_row(
    matrices: list[int],
    num_rows: int,
    num_columns: int,
    x: int,
    num_x: int,
    bias: int,
    results: int,
    is_float32: bool,
    num_threads: int,
    /,
) -> bool: ...
def normalise(
    x: int,
    num_rows: int,
    num_columns: int,
    weight: int,
    epsilon: float,
    rounds_twice: bool,
    adds_one: bool,
    y: int,
    is_float32: bool,
    /,
) -> bool: ...
def rotate(
    x: int,
    num_rows: int,
    num_columns: int,
    cos: int,
    sin: int,
    num_rotated: int,
    y: int,
    is_float32: bool,
    /,
) -> bool: ...
def attend(
    query: int,
    num_heads: int,
    width: int,
    keys: int,
    num_groups: int,
    num_tokens: int,
    key_head: int,
    key_token: int,
    values: int,
    value_width: int,
    value_head: int,
    value_token: int,
    scale: float,
    results: int,
    num_threads: int,
    /,
) -> bool: ...
