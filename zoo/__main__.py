"""python -m zoo: lists, checks, pulls and publishes entries."""

import sys

from configs.cli import main
from configs.command import Command

FACES = (
    ("list", "list:list_entries", None, "Lists the entries that `predictor=` accepts."),
    ("show", "list:show", "name", "Shows an entry's card and manifest."),
    ("verify", "list:verify", "name", "Checks the digest of every file of an entry."),
    ("pull", "pull:pull", "name", "Copies entries from another zoo into the user's."),
    ("lock", "pull:lock", None, "Writes zoo.lock, the digest of each entry."),
    ("push", "publish:push", "path", "Publishes an entry's folder in a zoo."),
    ("sign", "publish:sign", "path", "Signs an entry's folder (OpenSSF model signing)."),
    ("index", "publish:index", "path", "Makes a zoo of a folder of entries, for any web server."),
    ("rm", "publish:remove", "name", "Removes an entry, or a version of it, from a zoo."),
    ("gc", "publish:collect_garbage", None, "Removes the files that no entry references."),
)

COMMANDS = tuple(
    Command(
        name=name,
        config=f"zoo_{name}",
        run=f"zoo.commands.{run}",
        summary=summary,
        positional=positional,
        keeps_run=False,
    )
    for name, run, positional, summary in FACES
)

if __name__ == "__main__":
    sys.exit(main("zoo", COMMANDS))
