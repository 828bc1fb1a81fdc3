"""`python -m runtime COMMAND`: serve a model from a memory budget."""

import sys

from configs.cli import main
from configs.command import Command

SUMMARIES = {
    "generate": "continue a prompt with a model whose experts stay within a memory budget",
    "chat": "talk to a model in the terminal",
    "serve": "run an OpenAI-compatible server, whose clients share one budget and its experts",
    "batch": "continue a file of prompts at the highest throughput; can be interrupted and resumed",
    "verify": "compare logits and tokens with plain Transformers eager, for several budgets",
    "pack": "repack a model's experts for direct reads, with checksums, optionally quantised",
    "bench": "compare systems on this machine: same model and prompts, every token checked",
    "doctor": "measure this machine with this model and suggest a budget",
    "inflate": "write a copy of a model with larger experts that compute the same",
}

COMMANDS = tuple(
    Command(name=name, config=name, run=f"runtime.commands.{name}:run", summary=summary)
    for name, summary in SUMMARIES.items()
)

if __name__ == "__main__":
    sys.exit(main("runtime", COMMANDS))
