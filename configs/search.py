"""Searches options for the best result: `-m` with intervals, by Optuna.

All state is in `search.log` of the sweep's folder: the same command continues a search that was
interrupted, and joins one that another process runs in the same folder.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from hydra.errors import HydraException

from configs.errors import ConfigError
from configs.sweep import expand_option

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution

PREFIX = "sweep."
JOURNAL, LOCK = "search.log", ".search.lock"
STUDY = "sweep"
AXES = "axes"
INSTALL = "searching needs Optuna: pip install 'moecast[sweep]'"


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """The `sweep.` options."""

    trials: int = 20
    objective: str
    """Dotted name of a number in a run's results; the largest is the best."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a search."""

    number: int
    options: Mapping[str, Any]
    """Values of the options that are searched."""
    objective: float


def is_interval(argument: str) -> bool:
    """Returns whether the value of an option is an interval, in Hydra's grammar."""
    if "interval(" not in argument:
        return False
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:
        return False
    return isinstance(override.value(), IntervalSweep)


def split_settings(options: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the `sweep.` options by name, and the others."""
    own = dict(
        option.removeprefix(PREFIX).split("=", 1)
        for option in options
        if option.startswith(PREFIX) and "=" in option
    )
    return own, [option for option in options if not option.startswith(PREFIX)]


def read_settings(own: Mapping[str, str], *, objective: str) -> SearchSettings:
    """Returns the typed `sweep.` options; ConfigError for an unknown one or a wrong value."""
    known = {"trials": int, "seed": int, "objective": str}
    values: dict[str, Any] = {"objective": objective}
    for name, text in own.items():
        if name not in known:
            raise ConfigError(f"sweep.{name}: a search has sweep.{', sweep.'.join(known)}")
        try:
            values[name] = known[name](text)
        except ValueError:
            raise ConfigError(f"sweep.{name}={text}: must be a whole number") from None
    settings = SearchSettings(**values)
    if settings.trials < 1:
        raise ConfigError(f"sweep.trials={settings.trials}: must be at least 1")
    return settings


def read_axis(argument: str, kind: Any) -> "BaseDistribution | None":
    """Returns the values that an option may take; None if it has only one.

    Raises:
        ConfigError: an interval without values, or not Hydra's grammar.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    key, _, text = argument.partition("=")
    if not is_interval(argument):
        values = [option.partition("=")[2] for option in expand_option(argument, kind)]
        return CategoricalDistribution(values) if len(values) > 1 else None
    interval: Any = OverridesParser.create().parse_override(argument).value()
    low, high, is_log = interval.start, interval.end, "log" in interval.tags
    if not low < high:
        raise ConfigError(f"{key}={text}: the interval has no values")
    if is_log and low <= 0:
        raise ConfigError(f"{key}={text}: a logarithmic interval begins above 0")
    if kind is int:
        return IntDistribution(int(low), int(high), log=is_log)
    return FloatDistribution(float(low), float(high), log=is_log)


def search(
    axes: Mapping[str, "BaseDistribution"],
    settings: SearchSettings,
    *,
    folder: Path,
    run: Callable[[Mapping[str, Any], Path], Any],
) -> list[Trial]:
    """Runs trials until there are `settings.trials`, and returns all of them, the best first.

    Args:
        axes: What each option may be.
        settings: How many, and which number is the best.
        folder: Folder of the search; trial N runs in `folder/N`.
        run: Runs the command with these options in a folder, and returns its results.

    Raises:
        ConfigError: the folder has a search of other options, or the results lack the objective.
    """
    study = open_study(axes, settings, folder)
    while (taken := take(study, axes, settings, folder)) is not None:
        number, lock = taken
        trial = study.trials[number]
        target = folder / str(number)
        with closing_lock(lock):
            sys.stderr.write(f"trial {number}: {describe(trial.params)} -> {target}\n")
            try:
                value = read_objective(run(trial.params, target), settings.objective)
            except BaseException:
                study.tell(number, state=failed())
                raise
            study.tell(number, value)
        sys.stderr.write(f"trial {number}: {settings.objective} {value:.6g}\n")
    trials = [
        Trial(number=trial.number, options=trial.params, objective=trial.value)
        for trial in completed(study)
    ]
    return sorted(trials, key=lambda trial: (-trial.objective, trial.number))


def open_study(
    axes: Mapping[str, "BaseDistribution"], settings: SearchSettings, folder: Path
) -> "Study":
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    folder.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(folder / JOURNAL))),
        study_name=STUDY,
        direction="maximize",
        load_if_exists=True,
    )
    # Several processes, or one that continues, must not draw the same values again.
    study.sampler = optuna.samplers.TPESampler(seed=settings.seed + len(study.trials))
    wanted = {"objective": settings.objective, **{key: repr(axis) for key, axis in axes.items()}}
    known = study.user_attrs.get(AXES)
    if known is None:
        study.set_user_attr(AXES, wanted)
    elif known != wanted:
        raise ConfigError(f"{folder} has a search of other options ({describe(known)})")
    return study


def take(
    study: "Study",
    axes: Mapping[str, "BaseDistribution"],
    settings: SearchSettings,
    folder: Path,
) -> tuple[int, FileLock] | None:
    """Returns the number of a new trial and its lock; None if enough are complete or running."""
    # No other process may see a trial that is not locked yet.
    with FileLock(folder / LOCK):
        number = ask(study, axes, settings, folder)
        if number is None:
            return None
        lock = FileLock(lock_path(folder, number))
        lock.acquire()
        return number, lock


@contextmanager
def closing_lock(lock: FileLock) -> Iterator[None]:
    try:
        yield
    finally:
        lock.release()


def ask(
    study: "Study",
    axes: Mapping[str, "BaseDistribution"],
    settings: SearchSettings,
    folder: Path,
) -> int | None:
    from optuna.trial import TrialState

    running = study.get_trials(deepcopy=False, states=[TrialState.RUNNING])
    alive = 0
    for trial in running:
        if is_locked(lock_path(folder, trial.number)):
            alive += 1
        else:
            study.tell(trial.number, state=failed())  # its process was killed
    if len(completed(study)) + alive >= settings.trials:
        return None
    return study.ask(dict(axes)).number


def completed(study: "Study") -> list[Any]:
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])


def failed() -> Any:
    from optuna.trial import TrialState

    return TrialState.FAIL


def lock_path(folder: Path, number: int) -> Path:
    """Returns the file that the process which runs a trial has locked."""
    return folder / f".trial-{number}.lock"


def is_locked(path: Path) -> bool:
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True


def describe(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in options.items())


def read_objective(results: Any, name: str) -> float:
    """Returns a number of a run's results by its dotted name; ConfigError if there is none."""
    value = results
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"sweep.objective={name}: results.json has no such number")
    return float(value)
