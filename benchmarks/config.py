"""Settings of the benchmarks; the docstring under a field is its help text."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from predictors.config import SEVERAL, RunConfig
from predictors.errors import MoecastError, unknown
from runtime.config import SystemConfig
from runtime.sim.predictor_latency import LATENCY_FILE

RESULTS = Path("benchmarks/results")
ENVIRONMENTS = Path("runs/environments")
CONTROL_PLANE_SHAPES = ("12x8", "12x60", "24x64", "48x128", "60x512")
"""Layers and experts; `benchmarks.control_plane.model` has their other sizes."""


@dataclass(kw_only=True)
class BenchmarkConfig(RunConfig):
    output: Path
    """JSON file for the results."""

    def __post_init__(self) -> None:
        for name in (
            "repetitions",
            "requests",
            "workers",
            "max_new_tokens",
            "replay_tokens",
            "cases",
            "clients",
        ):
            value = getattr(self, name, 1)
            if isinstance(value, int) and value < 1:
                raise MoecastError(f"{name}={value}: must be at least 1")


@dataclass(kw_only=True)
class CeilingConfig(BenchmarkConfig):
    trace: Path
    """Folder of a trace with the signals layer_input, gate_input and experts."""
    output: Path = RESULTS / "ceiling.json"
    predictor: str | None = None
    """Train this kind only: mlp, residual, or skip for the untrained row."""
    most_passes: int | None = None
    """Leave out runs of more passes over the training data."""
    threads: int = 1
    """Threads of PyTorch."""


@dataclass(kw_only=True)
class CapacityConfig(BenchmarkConfig):
    output: Path = RESULTS / "capacity.json"
    repetitions: int = 3
    """Pairs of recordings, a short and a long one; the median of their differences is reported."""
    prompts: int = 24
    """Prompts of the long recording; the short one has an eighth of them."""
    machines: int = 10_000
    """Machines that pull an entry."""
    trace_tokens: int = 10**9
    """Tokens of the planned trace."""
    users: int = 12
    """Users of each model at a time."""
    context_tokens: int = 8192
    """Tokens of each user's prompt and answer."""


@dataclass(kw_only=True)
class LockstepConfig(BenchmarkConfig):
    output: Path = RESULTS / "lockstep.json"
    clients: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    """Numbers of sequences that are generated together, with commas between them."""
    exact: list[str] = field(default_factory=lambda: ["eager", "shared"])
    """Settings of `model.exact`, with commas between them; the first with one sequence is the
    reference."""
    dtype: str = "float32"
    """Dtype of the reference model."""
    budget: str = "100%"
    """Memory for experts."""
    system: str = "on-demand"
    """System that serves."""
    repetitions: int = 5
    """Rounds; the median of their ratios is reported."""
    steps: int = 24
    """Decode steps of a measurement."""
    threads: int = 2
    """Threads of PyTorch."""


@dataclass(kw_only=True)
class ControlPlaneConfig(BenchmarkConfig):
    output: Path = RESULTS / "control_plane.json"
    shape: list[str] = field(default_factory=lambda: [*CONTROL_PLANE_SHAPES])
    """Layers and experts of the random models, with commas between them."""
    budget: list[str] = field(default_factory=lambda: ["100%", "25%"])
    """Memory for experts. At 100% all are there from the beginning."""
    system: list[str] = field(default_factory=lambda: ["on-demand", "promoe", "moecast"])
    """Systems to compare with plain Transformers, with commas between them."""
    repetitions: int = 5
    """Turns that each system gets, one after another."""
    steps: int = 12
    """Decode steps of a turn."""
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    """Threads of PyTorch. With fewer than processors, predictors have a thread of their own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for shape in self.shape:
            if shape not in CONTROL_PLANE_SHAPES:
                raise MoecastError(unknown("shape", shape, CONTROL_PLANE_SHAPES))
        for name in ("steps", "threads"):
            if getattr(self, name) < 1:
                raise MoecastError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.repetitions < 3:
            raise MoecastError(
                f"repetitions={self.repetitions}: must be at least 3, of which a median is taken"
            )


@dataclass(kw_only=True)
class ContentionConfig(BenchmarkConfig):
    output: Path = RESULTS / "contention.json"
    repetitions: int = 3
    """Runs of each condition, interleaved."""


@dataclass(kw_only=True)
class MoecastConfig(BenchmarkConfig):
    trace: Path
    """Folder of a trace with all signals."""
    entries: Path
    """Folder of the entries residual, reuse and stride, as `python -m train predictor=all` writes
    them."""
    output: Path = RESULTS / "moecast.json"


@dataclass(kw_only=True)
class DraftsConfig(BenchmarkConfig):
    kinds: dict[str, Path]
    """File of JSON lines with prompts for each kind: `{code: PATH, chat: PATH}`."""
    model: str = "qwen2-moe-tiny"
    """Model: its short name, or a folder."""
    budget: str = "25%"
    """Memory for experts."""
    system: str = "moecast"
    prompts: int = 4
    """Prompts of each kind."""
    prompt_tokens: int = 192
    new_tokens: int = 64
    repetitions: int = 3
    threads: int = 1
    """Threads of PyTorch."""
    output: Path = RESULTS / "drafts.json"


@dataclass(kw_only=True)
class PrefillConfig(BenchmarkConfig):
    model: str = "qwen2-moe-tiny"
    """Model: its short name, or a folder."""
    budget: str = "25%"
    """Memory for experts."""
    system: list[str] = field(default_factory=lambda: ["on-demand", "promoe", "moecast"])
    """Systems, with commas between them."""
    prompts: int = 8
    """Prompts: sources of as many modules of the standard library."""
    prompt_tokens: int = 512
    threads: int = 2
    """Threads of PyTorch."""
    output: Path = RESULTS / "prefill.json"


@dataclass(kw_only=True)
class DequantiseConfig(BenchmarkConfig):
    repetitions: int = 15
    """Rounds; the median is reported."""
    threads: int = 1
    """Threads of PyTorch."""
    output: Path = RESULTS / "dequantise.json"


@dataclass(kw_only=True)
class LookaheadConfig(BenchmarkConfig):
    traces: dict[str, Path]
    """Trace of each kind of prompts: `{docs: PATH, code: PATH}`."""
    entries: dict[str, str] = field(default_factory=dict)
    """Zoo entries of predictors for eviction, by the name to show."""
    split: str | None = None
    """Requests to replay: held_out, train; none: all."""
    tokens: int = 1000
    output: Path = RESULTS / "lookahead.json"


@dataclass(kw_only=True)
class LatencyConfig(BenchmarkConfig):
    output: Path = LATENCY_FILE
    repetitions: int = 8
    """Requests, each of a prompt and some decode steps."""


@dataclass(kw_only=True)
class LaunchersConfig(BenchmarkConfig):
    output: Path = RESULTS / "launchers.json"
    part: list[str] = field(default_factory=list)
    """Measure these parts: core, engines, second_worker, killed, train; all unless given. The
    others stay as they are in the file."""
    without: list[str] = field(default_factory=list)
    """Launchers to leave out: ray, slurm, local."""
    quick: bool = False
    """A tenth of the prompts, and one repetition."""


@dataclass(kw_only=True)
class PapersConfig(BenchmarkConfig):
    trace: Path
    """Folder of a trace with all signals: signals=[layer_input,gate_input,gate_logits,experts,
    weights] of `python -m collect`."""
    entries: Path | None = None
    """Folder of trained entries that come before the zoo's."""
    output: Path = RESULTS / "papers.json"
    requests: int = 300
    """Held-out requests of each replay."""
    warm_requests: int = 20
    """Training requests before them, which fill the arena and are in no figure."""
    paper: str | None = None
    """Replay the figures of one paper: promoe, fmoe, moe-infinity-request, moe-infinity-sequence or
    klotski."""
    workers: int | None = None
    """Processes that replay; default: one for each core."""


@dataclass(kw_only=True)
class RoutingConfig(BenchmarkConfig):
    log: Path
    """Published routing log, as `collect import` reads it."""
    output: Path = RESULTS / "routing.json"
    origin: str = "unknown"
    """Source and licence of the log."""
    model_id: str = "unknown"
    """Model whose routing it is."""
    num_experts: int | None = None
    """Experts of each layer; default: the highest id of the log + 1."""
    budget: list[str] = field(default_factory=lambda: ["5%", "10%", "25%", "50%"])
    """Memory for experts."""
    hardware: str = "rtx4090-pcie4"
    """Machines to simulate."""
    shape: str = "qwen3-30b-a3b"
    """Sizes of the model's weights."""
    system: list[str] = field(default_factory=list)
    """Systems to replay, with commas between them; all unless given."""
    start: list[str] = field(default_factory=lambda: ["filled", "empty"])
    """State of the cache of every system when the log begins: filled (with the first layers'
    experts), empty, or both with a comma between them."""
    workers: int | None = None
    """Processes that replay; default: one for each core."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for start in self.start:
            if start not in ("filled", "empty"):
                raise MoecastError(unknown("start", start, ("filled", "empty")))


@dataclass(kw_only=True)
class ScalingConfig(BenchmarkConfig):
    trace: Path
    """Folder of a trace with all signals."""
    entries: Path | None = None
    """Folder of trained entries that come before the zoo's."""
    output: Path = RESULTS / "scaling.json"
    requests: int = 300
    """Held-out requests of each replay."""
    warm_requests: int = 20
    """Training requests before them, which fill the arena and are in no figure."""
    workers: int | None = None
    """Processes that replay; default: one for each core."""
    system: str = "moe-infinity-sequence"
    """System to replay: a file of configs/system."""


@dataclass(kw_only=True)
class QuantisedConfig(BenchmarkConfig):
    held_out: Path
    """Held-out token ids (uint16) that `python -m train.reference` keeps apart."""
    output: Path = RESULTS / "quantised.json"
    environments: Path = ENVIRONMENTS
    """Folder of the environments that `python -m benchmarks environments` builds: lm-eval's."""


@dataclass(kw_only=True)
class FormatsConfig(BenchmarkConfig):
    model: Path
    """Folder of the reference model inflated by `python -m runtime inflate`."""
    stores: Path | None = None
    """Folder for the packed experts of each format; by default beside the model. Kept."""
    output: Path = RESULTS / "formats.json"
    budget: str = "25%"
    """Memory for experts, as a share of the float32 experts' bytes, for every format."""
    system: list[str] = field(default_factory=lambda: ["on-demand", "promoe", "moecast"])
    repetitions: int = 3
    """Runs of each format with each system, in turns."""
    requests: int = 2
    new_tokens: int = 24
    """Greedy tokens of each request."""
    warm_up_tokens: int = 64
    """Greedy tokens of the request before them."""


@dataclass(kw_only=True)
class RealSizeConfig(BenchmarkConfig):
    output: Path = RESULTS / "real_size.json"
    work: Path = Path("runs/real-size")
    """Folder for the model, about 21 GB: written once, then verified and kept."""
    shape: Path | None = None
    """config.json of another Qwen3-MoE model, in place of Qwen3-30B-A3B's."""
    routing: Path | None = None
    """Routing log (as `collect import` reads it) that the routers choose by; the model then takes
    as many experts per token as the log. Without one, random routers choose."""
    budget: list[str] = field(default_factory=lambda: ["2GiB", "4GiB", "8GiB"])
    """Memory for experts, with commas between the sizes."""
    system: list[str] = field(default_factory=lambda: ["on-demand", "promoe", "moecast"])
    """Systems to serve with, with commas between them."""
    predictor: str = "correlation"
    """Kind in place of a trained one, which random weights have not, for systems without a
    fallback."""
    prompt_tokens: int = 16
    """Random tokens of each prompt."""
    warm_up_tokens: int = 33
    """Greedy tokens of the request before the measured ones."""
    requests: int = 1
    """Measured requests of each run, one after another."""
    max_new_tokens: int = 65
    """Greedy tokens of each measured request."""
    repetitions: int = 1
    """Runs of each budget and system, in turns."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prompt_tokens", "warm_up_tokens"):
            if getattr(self, name) < 1:
                raise MoecastError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.max_new_tokens < 3:
            raise MoecastError(f"max_new_tokens={self.max_new_tokens}: must be at least 3")


@dataclass(kw_only=True)
class ReadsConfig(BenchmarkConfig):
    model: Path
    """Folder of a model: `python -m runtime inflate expert_size=8MiB model.dtype=bfloat16`."""
    store: Path
    """The same model's packed store: `python -m runtime pack`."""
    output: Path = RESULTS / "reads.json"


@dataclass(kw_only=True)
class ValidateConfig(BenchmarkConfig):
    model: Path
    """Folder of a model: `python -m runtime inflate total_size=2GiB model.dtype=float32`."""
    output: Path = RESULTS / "validate.json"
    budget: list[str] = field(default_factory=lambda: ["25%", "50%", "75%"])
    """Memory for experts, with commas between the sizes."""
    system: list[SystemConfig] = field(default_factory=list, metadata={SEVERAL: "all"})
    """Systems to run live and simulated; those that know the future routing are left out."""
    repetitions: int = 2
    """Runs of each budget and system, interleaved."""
    max_new_tokens: int = 32
    """Tokens to generate for each prompt."""


@dataclass(kw_only=True)
class KlotskiConfig(BenchmarkConfig):
    model: Path
    """Folder of a model: `python -m runtime inflate total_size=2GiB model.dtype=float32`."""
    trace: Path | None = None
    """Folder of a trace; without one nothing is simulated and no quality is measured."""
    output: Path = RESULTS / "klotski.json"
    budget: str = "25%"
    """Memory for experts."""
    batch_size: int = 16
    """Requests of a batch, in the ablation."""
    n: int = 8
    """Batches of a group, in the ablation."""
    sizes: list[int] = field(default_factory=lambda: [4, 16])
    """Batch sizes of figure 14, with commas between them."""
    groups: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    """Batches of a group of figure 14, with commas between them."""
    prompt_tokens: int = 16
    """Tokens of each prompt."""
    max_new_tokens: int = 12
    """Tokens to generate for each prompt."""
    repetitions: int = 1
    """Runs of each variant, interleaved."""
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    """Threads of PyTorch."""
    accelerate: bool = True
    """Compare with Accelerate's disk offload; needs its environment, Linux and root."""
    work: Path = Path("runs/peers")
    """Folder for Accelerate's weights and logs."""
    environments: Path = ENVIRONMENTS
    """Folder of the environments that `python -m benchmarks environments` builds."""
    page: Path = Path("runs/klotski")
    """Folder for the page with the figures."""


@dataclass(kw_only=True)
class PeersConfig(BenchmarkConfig):
    model: Path
    """Folder of a model: `python -m runtime inflate total_size=2GiB model.dtype=float32`, or
    `python -m benchmarks random`."""
    output: Path = RESULTS / "peers.json"
    format: list[str] = field(default_factory=lambda: ["float32", "bfloat16", "int8", "int4"])
    """Formats of the experts, with commas between them: float32, bfloat16, int8, int4. llama.cpp
    has Q8_0 for int8 and Q4_0 for int4. Others in the results stay as they are."""
    peer: list[str] = field(default_factory=list)
    """Programs and systems to run, with commas between them; all unless given."""
    budget: list[str] = field(default_factory=lambda: ["25%", "50%", "100%"])
    """Memory for experts, with commas between the sizes; a share is one of all experts as this
    project packs them in the format."""
    read_ahead: list[int] = field(default_factory=lambda: [128])
    """KiB of the disk's read-ahead, besides the machine's own, at which programs that map their
    weights run while not all experts fit; needs root. [] for none."""
    repetitions: int = 3
    """Runs of each peer and budget, interleaved."""
    max_new_tokens: int = 24
    """Tokens to generate for each prompt."""
    seconds_per_prompt: float = 4.0
    """An answer that takes longer ends early, after three tokens or more."""
    warm_ups: int = 2
    """Prompts of 64 random tokens before the measured ones, which fill the memory."""
    threads: list[int] = field(default_factory=lambda: [os.cpu_count() or 1])
    """Threads of each program, with commas between the numbers."""
    entries: Path | None = None
    """Folder of trained entries that come before the zoo's."""
    work: Path = Path("runs/peers")
    """Folder for other layouts of the weights, scratch files and logs."""
    environments: Path = ENVIRONMENTS
    """Folder of the environments that `python -m benchmarks environments` builds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, values, least in (
            ("threads", self.threads, 1),
            ("read_ahead", self.read_ahead, 0),
            ("warm_ups", [self.warm_ups], 0),
        ):
            if any(value < least for value in values):
                raise MoecastError(f"{name}={getattr(self, name)}: must be at least {least}")
        if not self.threads:
            raise MoecastError("threads=[]: give at least one number")


@dataclass(kw_only=True)
class RandomConfig(RunConfig):
    output: Path
    """Folder for the checkpoint."""
    num_layers: int = 4
    """Layers, of which Qwen3-30B-A3B has 48; the vocabulary shrinks in the same proportion."""


@dataclass(kw_only=True)
class GpuConfig(BenchmarkConfig):
    output: Path = RESULTS / "gpu.json"
    device: str = "auto"
    """Accelerator to measure; cpu runs the same steps with a small model and a second tier of host
    memory, to try the benchmark itself."""
    work: Path = Path("runs/gpu")
    """Folder for the models."""
    num_layers: int = 7
    """Layers of Qwen3-30B-A3B's shape with random weights, 1.2 GB each."""
    budget: list[str] = field(default_factory=lambda: ["25%", "50%"])
    """Memory for experts on the device, with commas between them."""
    steps: int = 1000
    """Decode steps in an arena of a few experts."""
    max_new_tokens: int = 64
    """Timed tokens of each system."""
    tests: Path | None = Path("tests")
    """Folder of tests for `pytest -m gpu`; null: none."""


@dataclass(kw_only=True)
class EnvironmentsConfig(RunConfig):
    name: list[str] = field(default_factory=list)
    """Environments to build, with commas between them; all unless given."""
    folder: Path = ENVIRONMENTS
    """Folder for the environments."""


@dataclass(kw_only=True)
class ServingConfig(BenchmarkConfig):
    output: Path = RESULTS / "serving.json"


@dataclass(kw_only=True)
class StormConfig(ServingConfig):
    requests: int = 200
    """Requests that are sent together."""
    max_new_tokens: int = 10_000
    """Tokens that each asks for."""
    repetitions: int = 3
    """Storms, one after another."""


@dataclass(kw_only=True)
class ShutdownConfig(ServingConfig):
    requests: int = 12
    """Answers in progress when SIGTERM is sent."""
    max_new_tokens: int = 64
    """Tokens of each answer, where the server has a grace period."""
    repetitions: int = 3
    """Shutdowns with and without a grace period."""


@dataclass(kw_only=True)
class QueueConfig(ServingConfig):
    requests: int = 500
    """Requests to the full server, one after another and again eight at a time."""
    max_new_tokens: int = 500
    """Tokens of each of the answers that fill it."""


@dataclass(kw_only=True)
class FuzzConfig(ServingConfig):
    cases: int = 1500
    """Requests to send."""


@dataclass(kw_only=True)
class DisconnectsConfig(ServingConfig):
    requests: int = 1000
    """Clients that leave."""
    max_new_tokens: int = 1500
    """Tokens that each asks for."""


@dataclass(kw_only=True)
class ClientsConfig(ServingConfig):
    client: list[str] = field(default_factory=list)
    """Programs to run, with commas between them; all unless given."""
    environments: Path = ENVIRONMENTS
    """Folder of the environments that `python -m benchmarks environments` builds."""


@dataclass(kw_only=True)
class ArrivalsConfig(ServingConfig):
    trace: Path
    """AzureLLMInferenceTrace_conv.csv or ..._code.csv of github.com/Azure/AzurePublicDataset."""
    model: Path | None = None
    """Folder of a model; the reference model unless given."""
    system: list[str] = field(
        default_factory=lambda: ["on-demand", "promoe", "moe-infinity-request", "fmoe", "moecast"]
    )
    """Systems to serve with, one after another, with commas between them."""
    budget: str = "25%"
    """Memory for experts."""
    requests: int = 32
    """Successive requests of the trace; the seed chooses the first."""
    mean_prompt_tokens: float = 48.0
    """Mean prompt length to scale the trace to."""
    mean_new_tokens: float = 16.0
    """Mean answer length to scale the trace to."""
    load: float = 0.8
    """Request rate, as a share of what the first system serves one after another."""
    rate: float | None = None
    """Requests per second, in place of `load`."""
    repetitions: int = 1
    """Replays of each system, interleaved; answers of all of them are pooled."""
    part: str = "arrivals"
    """Key of the results in the file."""
    page: Path = Path("runs/serving/arrivals")
    """Folder for the page with the distributions, its figures and CSV files."""


@dataclass(kw_only=True)
class SoakConfig(ServingConfig):
    minutes: float = 20.0
    """Duration of the load."""
    round_seconds: float = 60.0
    """Seconds of load between two looks at the idle server's memory."""
    clients: int = 6
    """Clients that send one request after another."""
    model: Path | None = None
    """Folder of a model; the reference model unless given."""
    budget: str = "50%"
    """Memory for experts."""


@dataclass(kw_only=True)
class AttackConfig(ServingConfig):
    minutes: float = 60.0
    """Duration of the attacks."""
    honest: int = 3
    """Clients that ask questions with known answers, one after another."""
    hostile: int = 4
    """Clients that attack, one way after another."""
    model: Path | None = None
    """Folder of a model; the reference model unless given."""
    budget: str = "50%"
    """Memory for experts."""
    predictor: str | None = None
    """Predictor of the server; its own choice unless given."""


@dataclass(kw_only=True)
class ScreenshotConfig(BenchmarkConfig):
    output: Path = Path("docs/images/status-page.png")
    """PNG file of the status page."""
    budget: str = "50%"
    """Memory for experts, of the reference model."""
    seconds: float = 75.0
    """Time for which the page is open and requests are sent."""


@dataclass(kw_only=True)
class TablesConfig(RunConfig):
    """`python -m benchmarks tables` has no options of its own."""
