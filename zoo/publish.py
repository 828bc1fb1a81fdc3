"""What an entry must have before others are offered it."""

from zoo.card import check_card
from zoo.entry import CARD, METRICS, Entry
from zoo.errors import RefusedError, ZooError


def check_publishable(entry: Entry) -> None:
    """RefusedError that lists everything that is missing; every byte has been checked."""
    manifest = entry.manifest
    entry.verify()
    missing = []
    if CARD not in manifest.files:
        missing.append(f"a model card ({CARD})")
    else:
        try:
            check_card(entry.read(CARD), manifest)
        except ZooError as error:
            missing.append(f"a model card that holds ({error})")
    if not manifest.licence.strip():
        missing.append("a licence")
    measured = [one for one in manifest.metrics.values() if isinstance(one, float | int)]
    if not measured or not entry.metrics().get("held_out"):
        missing.append(f"metrics on held-out requests ({METRICS}, key held_out)")
    if any(path.endswith(".onnx") and one.graph is None for path, one in manifest.files.items()):
        missing.append("declared inputs and outputs of its graphs")
    if manifest.trace_digest is None:
        missing.append("the digest of the trace it was trained on")
    if missing:
        raise RefusedError(
            f"{manifest.name} in {entry.where} is not published: it lacks {'; '.join(missing)}. "
            "Entries written by `python -m train` have all of it."
        )
