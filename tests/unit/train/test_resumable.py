"""Pieces of work that outlive the run which was interrupted."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from train.resumable import FinishedPieces, OnFinished, run_jobs


@dataclass(frozen=True)
class SquaringJob:
    """Squares numbers and fails at a negative one."""

    numbers: Sequence[int]

    @property
    def digests(self) -> Sequence[str]:
        return [str(number) for number in self.numbers]

    @property
    def cost(self) -> float:
        return len(self.numbers)

    def run(self, on_finished: OnFinished) -> None:
        for number in self.numbers:
            if number < 0:
                raise ValueError(number)
            on_finished(str(number), {"square": number**2})


@pytest.mark.parametrize("workers", [1, 2])
def test_jobs__keep_every_finished_piece(tmp_path, workers: int) -> None:
    done: list[int] = []
    jobs = [SquaringJob((2, 3)), SquaringJob((4, 5, -1))]
    with pytest.raises(ValueError, match="-1"):
        run_jobs(jobs, folder=tmp_path, workers=workers, advance=done.append)
    finished = FinishedPieces(tmp_path)
    # The longest job runs first, and the failure leaves what was done before it.
    assert [finished.read(digest)["square"] for digest in ("4", "5")] == [16, 25]
    assert not finished.path("-1").exists()
    run_jobs([SquaringJob((2, 3))], folder=tmp_path, workers=workers, advance=done.append)
    run_jobs([], folder=tmp_path, workers=workers, advance=done.append)
    assert finished.read("3") == {"square": 9}
