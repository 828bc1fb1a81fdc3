"""Options of `moecast bench`."""

from dataclasses import dataclass, field
from pathlib import Path

from predictors.config import RunConfig, chosen, require_at_least, several
from predictors.errors import MoecastError
from runtime.config import REFERENCE_MODEL, ModelConfig, StoreConfig, SystemConfig

LEAST_REPETITIONS = 3
"""Fewest repetitions that a median is taken over."""

PROMPTS = [
    "It was late in the evening when the old man came to the door",
    "The heart pumps blood through the body, and the lungs",
    "def and class statements bind names in the current namespace",
    "The first thing that he saw was a large white house",
    "Return a new list that contains the items of the other one",
    "The river runs through the valley and into the sea",
    "If the argument is a string, it is converted to an integer",
    "She opened the letter, read it twice, and said nothing",
]


@dataclass(frozen=True, kw_only=True)
class BenchConfig(RunConfig):
    model: ModelConfig = chosen(ModelConfig, "model", REFERENCE_MODEL)
    store: StoreConfig = field(default_factory=StoreConfig)
    system: list[SystemConfig] = several("system")
    """Systems to compare; a bound (oracle) is simulated from the run's routing. The system without
    prefetching, on-demand, is always included."""
    budget: list[str] = field(default_factory=lambda: ["25%", "50%", "75%"])
    """Memory for experts, as for `generate`."""
    batch_size: list[int] = field(default_factory=lambda: [1])
    """Prompts that are continued together."""
    ablation: bool = False
    """Also promoe without each of chunks, early preemption and reordering (ProMoE, figure 12)."""
    predictor: str | None = None
    """Kind, zoo entry or folder, in place of what each system names; or a run folder, as for
    `entries`."""
    entries: Path | None = None
    """Run folder of `moecast train`, or a folder with an entry for each kind; looked at before the
    zoo."""
    prompts: list[str] = field(default_factory=lambda: list(PROMPTS))
    """Prompts, taken in turn: the first ones warm up, the next are measured."""
    routing: Path | None = None
    """Routing log (as `collect import` reads it), whose experts take the place of the routers'
    choice; the text is then meaningless."""
    requests: int = 1
    """Requests measured in each run, each of `batch_size` prompts, one after another."""
    max_new_tokens: int = 32
    """Greedy tokens of each request."""
    warm_up_tokens: int = 8
    """Greedy tokens of the request before the measured ones; 0: none, the arena is empty."""
    repetitions: int = 3
    """Runs of every system at every budget and batch size, in turns, there and back."""
    verify: bool = False
    """Also compare every token with plain Transformers, all experts in memory."""
    device: str = "auto"
    """Device of the model: auto (a GPU if there is one), cpu, cuda, xpu, mps, cuda:1."""

    def __post_init__(self) -> None:
        for name in ("budget", "batch_size", "prompts", "system"):
            if not getattr(self, name):
                raise MoecastError(f"{name}: must name at least one; there is nothing to run")
        for batch in self.batch_size:
            if batch < 1:
                raise MoecastError(f"batch_size={batch}: must be at least 1")
        least = {"repetitions": LEAST_REPETITIONS, "max_new_tokens": 2, "requests": 1}
        require_at_least(self, **least, warm_up_tokens=0)
