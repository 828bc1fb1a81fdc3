"""A timeline of a live run that is kept as numbers, for measurements."""

from dataclasses import dataclass, field

from runtime.policy.eviction.protocol import Expert
from runtime.policy.tier import TransferTask


@dataclass
class Spans:
    """Records what a `TimelineSink` receives; times are those of `time.perf_counter`.

    Transfer threads append in any order; each append is atomic.
    """

    layers: list[tuple[int, float, float]] = field(default_factory=list)
    """Layer without its routed experts: from the last expert before it to its router's output."""
    experts: list[tuple[float, float]] = field(default_factory=list)
    predictions: list[tuple[float, float]] = field(default_factory=list)
    stalls: list[tuple[float, float]] = field(default_factory=list)
    transfers: list[tuple[str, Expert, float, float]] = field(default_factory=list)
    """Transfers with the name of the thread."""
    steps: list[tuple[float, float]] = field(default_factory=list)

    def clear(self) -> None:
        for spans in vars(self).values():
            spans.clear()

    def transferred(
        self, link: str, task: TransferTask, start: float, end: float, *, track: str
    ) -> None:
        del link
        self.transfers.append((track, task.expert, start, end))

    def computed(self, expert: Expert, start: float, end: float) -> None:
        del expert
        self.experts.append((start, end))

    def stalled(self, layer: int, start: float, end: float) -> None:
        """The computation waited for bytes."""
        del layer
        self.stalls.append((start, end))

    def computed_dense(self, layer: int, start: float, end: float) -> None:
        """The computation was at something else than routed experts, up to `layer`'s router."""
        self.layers.append((layer, start, end))

    def predicted(self, event: str, layer: int, start: float, end: float) -> None:
        """A predictor answered an event."""
        del event, layer
        self.predictions.append((start, end))

    def step(self, num_tokens: int, start: float, end: float) -> None:
        del num_tokens
        self.steps.append((start, end))

    def close(self) -> None:
        """Do nothing: there is no file."""
