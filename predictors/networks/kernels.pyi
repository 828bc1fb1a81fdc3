from collections.abc import Sequence
from typing import Any

from predictors.base import Floats

INSTRUCTIONS: tuple[str, ...]
"""What can compute products in eight bits here: avx512vnni, avx2, portable. The first one does."""

class Program:
    """The operations of a network over buffers of float32 numbers (`program.NetworkProgram`).

    Raises:
        ValueError: An operation does not fit its buffers.
    """

    def __new__(
        cls,
        buffers: tuple[tuple[int, int, int], ...],
        operations: tuple[tuple[Any, ...], ...],
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
    ) -> Program: ...
    def run(
        self,
        rows: int,
        inputs: tuple[Floats | tuple[Floats, ...], ...],
        outputs: tuple[Floats | None, ...],
    ) -> None:
        """Fills the outputs; None: one that is not needed. With 4 rows or more, other threads run.

        Raises:
            ValueError: An array is not contiguous float32 of the right size.
        """

def fade_token(
    fading_FE: Floats,
    decays_F: Floats,
    num_counts: int,
    used: Sequence[int],
    logits_E: Floats,
    means_FE: Floats,
) -> None:
    """Adds a token to a layer's sums, in place, and writes them as means (`predictors.fading`).

    The first `num_counts` rows count the experts `used`, the others add the probabilities of the
    router's logits. Ids beyond the experts are no choice.
    """

def share_chosen(used: Sequence[int], logits_E: Floats, shares_E: Floats) -> None:
    """Fills a token's shares: of the experts `used`, their number times their probabilities.

    The others have none. Ids beyond the experts are no choice.
    """

def rank(
    scores_HE: Floats, top_k: int, probability_HE: Floats
) -> list[tuple[list[int], list[float]]]:
    """Fills one token's probabilities, and returns the best experts of each row with theirs.

    The probability of an expert is `1 - (1 - score)`, as that of any of several tokens rounds. The
    best are those with the highest scores above 0, best first; ties go to the lower id.
    """

def are_finite(array: Floats) -> bool:
    """Returns whether no number of a float32 array of up to three dimensions is NaN or infinite."""

def decay(sums: Floats, decays: Floats, added: Floats) -> None:
    """Replaces sums by `sums * decays + added`, each operation rounded as in NumPy."""

def widen(address: int, array: Floats) -> None:
    """Fills a contiguous float32 array from as many bfloat16 numbers at an address in memory."""

def use_instructions(name: str) -> None:
    """Computes products in eight bits with other instructions from now on, for tests.

    Raises:
        ValueError: They are none of `INSTRUCTIONS`.
    """
