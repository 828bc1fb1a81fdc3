"""`python -m benchmarks COMMAND`: run one benchmark, or write the tables of all results."""

import sys

from configs.cli import main
from configs.commands import Command

TABLE = (
    ("environments", "environments", "builds the pinned environments of other programs"),
    (
        "tables",
        "tables.pages",
        "writes all tables and figures of README, docs and benchmarks",
    ),
    (
        "moecast",
        "moecast",
        "ablation of moecast, from promoe to all routing known (simulated)",
    ),
    ("prefill", "prefill", "time of a prompt over that of its bytes or its computation"),
    ("drafts", "drafts", "decoding with drafted tokens over decoding without, by prompts"),
    (
        "lookahead",
        "lookahead",
        "eviction by what is known of coming tokens, and by learned predictors (simulated)",
    ),
    ("papers", "papers.run", "the papers' figures and tables next to replays (simulated)"),
    ("routing", "routing", "every system on the published routing of a real model (simulated)"),
    ("scaling", "papers.scaling", "experts spread over more devices and more machines (simulated)"),
    (
        "capacity",
        "capacity.run",
        "what long traces, training and replays take, from measured pieces",
    ),
    ("latency", "latency", "latency of each kind of predictor, by the shape of the model"),
    ("validate", "validate", "the simulator next to live runs of the same steps on this machine"),
    (
        "quantised",
        "quantised",
        "loss of the reference model in every format that it can be served in",
    ),
    (
        "real-size",
        "real_size.run",
        "speed, memory and load time at Qwen3-30B-A3B's real size, random int4 weights",
    ),
    ("formats", "formats", "speed of float32, bfloat16, int8, int4 and HQQ in the same memory"),
    ("payoff", "payoff", "moecast over on-demand, by format and budget: never 3 % slower"),
    ("dequantise", "dequantise", "time of dequantising one expert of MXFP4 and of FP8"),
    ("kernels", "kernels", "a layer's quantised experts over the memory's bandwidth, by type"),
    (
        "control-plane",
        "control_plane.run",
        "time that serving adds to plain Transformers, by part of the program",
    ),
    ("lockstep", "lockstep", "throughput of several sequences over that of one, by model.exact"),
    ("klotski", "klotski.run", "batch groups live and simulated: Klotski's figures and table 3"),
    ("peers", "peers.run", "other programs with the same weights, prompts and memory"),
    ("gpu", "gpu", "a first look at an accelerator: exactness, overlap, speed"),
    ("random", "random_model", "writes a checkpoint of Qwen3-30B-A3B's shape, for peers"),
    ("clients", "serving.clients", "server: lm-eval, locust and aiperf, unmodified"),
    ("arrivals", "serving.arrivals", "server: latency under a public trace's arrivals, by system"),
    ("attack", "serving.attack", "server: honest clients next to hostile ones, with little memory"),
)
"""Name, module and summary; the module has the function `run_NAME`, with _ in place of -, and
`config.py` in its folder the options."""


def describe_command(name: str, module: str, summary: str) -> Command:
    folder, dot, _ = module.rpartition(".")
    return Command(
        name=name,
        config=f"benchmarks.{folder}{dot}config:{name.title().replace('-', '')}Config",
        run=f"benchmarks.{module}:run_{name.replace('-', '_')}",
        summary=summary,
    )


COMMANDS = tuple(describe_command(*row) for row in TABLE)

if __name__ == "__main__":
    sys.exit(main("benchmarks", COMMANDS))
