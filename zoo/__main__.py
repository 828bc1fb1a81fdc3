"""python -m zoo: the entries there are, and getting, checking and publishing them."""

import sys

from configs.cli import main
from configs.command import Command

FACES = (
    ("list", "looking:list_entries", None, "Lists the entries that `predictor=` accepts."),
    ("show", "looking:show", "name", "Shows an entry's card, and what its manifest says."),
    ("verify", "looking:verify", "name", "Reads every byte of an entry, compares digests."),
    ("pull", "getting:pull", "name", "Copies entries from another zoo into this user's."),
    ("lock", "getting:lock", None, "Writes zoo.lock: the digest of each name."),
    ("push", "keeping:push", "path", "Publishes an entry's folder in a zoo."),
    ("sign", "keeping:sign", "path", "Signs an entry's folder (OpenSSF model signing)."),
    ("index", "keeping:index", "path", "Makes a zoo of a folder of entries, for any web server."),
    ("rm", "keeping:remove", "name", "Takes an entry, or a version of it, out of a zoo."),
    ("gc", "keeping:collect_garbage", None, "Removes the files that no entry names."),
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
