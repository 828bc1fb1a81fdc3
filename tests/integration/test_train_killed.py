"""A training that is killed anywhere and run again gives what it gives without interruption."""

from tests.builders.forked import call_in_forks
from tests.builders.killed_trainings import run_both


def test_train__killed_and_run_again_gives_the_same_entries(tmp_path) -> None:
    uninterrupted, killed = call_in_forks(run_both, [tmp_path])[0]
    assert uninterrupted.keys() >= {"residual", "mlp", "stride", "reuse"}
    assert killed == uninterrupted
