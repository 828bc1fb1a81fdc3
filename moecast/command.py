"""The command `moecast`: finds the program of a command and lists the commands."""

import sys
from collections.abc import Sequence

from configs.program import run_program

RUNTIME = "runtime"
COMMANDS = {
    "Serve a model from a memory budget": {
        "generate": (RUNTIME, "continues a prompt"),
        "chat": (RUNTIME, "talks with a model in the terminal"),
        "serve": (RUNTIME, "runs an OpenAI-compatible server"),
        "batch": (RUNTIME, "continues a file of prompts at the highest throughput"),
        "monitor": (RUNTIME, "writes Prometheus's alert rules and a Grafana dashboard for servers"),
    },
    "Measure": {
        "doctor": (RUNTIME, "measures this machine with a model and suggests a budget"),
        "verify": (RUNTIME, "compares the output with plain Transformers, bit by bit"),
        "bench": (RUNTIME, "compares systems on this machine"),
        "evaluate": ("train.evaluate", "compares systems on simulated machines"),
    },
    "Prepare a model": {
        "pack": (RUNTIME, "repacks the experts for direct reads, optionally quantised"),
        "inflate": (RUNTIME, "writes a copy with larger experts that compute the same"),
    },
    "Train and share predictors": {
        "collect": ("collect", "records a trace of a model; collect import: from a routing log"),
        "train": ("train", "trains, scores and exports; also: train reuse"),
        "zoo": ("zoo", "lists, shows, pulls, verifies and publishes predictors"),
    },
}
"""By heading of the help: command to the program that runs it and a line of help."""
EXAMPLE = 'moecast generate qwen2-moe-tiny prompt="The heart pumps blood" budget=50%'


def main(arguments: Sequence[str]) -> int:
    """Runs a command; returns the exit code: 0 done, 1 failed, 2 wrong use, 130 interrupted."""
    commands = {name: row for rows in COMMANDS.values() for name, row in rows.items()}
    if not arguments:
        sys.stderr.write(write_help())
        return 2
    name, *rest = arguments
    if name in commands:
        program, _ = commands[name]
        if program == RUNTIME:
            return run_program(program, arguments, called="moecast")
        return run_program(program, rest, called=f"moecast {name}")
    if name in ("-V", "--version"):
        from moecast import __version__

        sys.stdout.write(f"moecast {__version__}\n")
        return 0
    if name in ("-h", "--help", "help"):
        sys.stdout.write(write_help())
        return 0
    from predictors.errors import unknown

    sys.stderr.write(f"error: {unknown('command', name, commands)}\n")
    return 2


def write_help() -> str:
    """Writes the commands by what they are for, and an example."""
    lines = ["usage: moecast COMMAND [MODEL] [key=value ...]"]
    for heading, rows in COMMANDS.items():
        lines += ["", f"{heading}:"]
        lines += [f"  {name:8}  {summary}" for name, (_, summary) in rows.items()]
    lines += ["", "Example:", f"  {EXAMPLE}", ""]
    lines += ["moecast COMMAND --help lists a command's options; moecast --version.", ""]
    return "\n".join(lines)
