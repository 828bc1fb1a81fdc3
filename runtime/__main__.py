"""`python -m runtime COMMAND`: serve a model from a memory budget."""

import sys

from configs.cli import Command, main

COMMANDS = (
    Command(
        name="generate",
        config="generate",
        run="runtime.commands.generate:run",
        summary="continue a prompt with a model whose experts stay within a memory budget",
    ),
    Command(
        name="batch",
        config="batch",
        run="runtime.commands.batch:run",
        summary="continue a file of prompts, at the highest tokens a second; it may be interrupted",
    ),
    Command(
        name="verify",
        config="verify",
        run="runtime.commands.verify:run",
        summary="compare logits and tokens with plain Transformers eager, for several budgets",
    ),
    Command(
        name="pack",
        config="pack",
        run="runtime.commands.pack:run",
        summary="repack a model's experts for direct reads, with checksums, on request quantised",
    ),
    Command(
        name="bench",
        config="bench",
        run="runtime.commands.bench:run",
        summary="compare systems on this machine: same model and prompts, every token checked",
    ),
    Command(
        name="doctor",
        config="doctor",
        run="runtime.commands.doctor:run",
        summary="what this machine and this model can do together, and which budget to give",
    ),
    Command(
        name="inflate",
        config="inflate",
        run="runtime.commands.inflate:run",
        summary="write a copy of a model whose experts are larger and compute the same",
    ),
)

if __name__ == "__main__":
    sys.exit(main("runtime", COMMANDS))
