"""python -m zoo: the entries there are, and getting, checking and publishing them."""

import sys

from configs.cli import Command, main

COMMANDS = (
    Command(
        name="list",
        config="zoo_list",
        run="zoo.commands:list_entries",
        summary="Lists the entries that `predictor=` accepts.",
        keeps_run=False,
    ),
    Command(
        name="show",
        config="zoo_show",
        run="zoo.commands:show",
        summary="Shows an entry: what it was made for, its figures, its files.",
        positional="name",
        keeps_run=False,
    ),
    Command(
        name="verify",
        config="zoo_verify",
        run="zoo.commands:verify",
        summary="Reads every byte of an entry and compares digests.",
        positional="name",
        keeps_run=False,
    ),
    Command(
        name="pull",
        config="zoo_pull",
        run="zoo.commands:pull",
        summary="Copies an entry from another zoo into this user's.",
        positional="name",
        keeps_run=False,
    ),
    Command(
        name="push",
        config="zoo_push",
        run="zoo.commands:push",
        summary="Publishes an entry's folder in a zoo.",
        positional="path",
        keeps_run=False,
    ),
)

if __name__ == "__main__":
    sys.exit(main("zoo", COMMANDS))
