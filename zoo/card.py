"""The model card (README.md) of an entry, generated from its manifest and metrics."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from predictors.terminal import escape_controls
from zoo.errors import ZooError
from zoo.manifest import EntryManifest

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

log = logging.getLogger(__name__)

MAX_CARD_BYTES = 1 << 20

DEFINITIONS = """\
* **accuracy**: mean over tokens of |predicted top_k and chosen| / top_k.
* **fetch_rate**: share of predicted experts whose bytes had all arrived before their layer was
  routed, in a replay of the held-out trace on the named hardware profile.
* **good_pred**: share of needed experts that were predicted x fetch_rate; layers that are not
  covered count 0."""


def write_card(manifest: EntryManifest, *, extra: str = "") -> bytes:
    """Writes front matter for the Hub and a page; `extra` precedes the section on limits."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    model = manifest.model
    results = [
        EvalResult(
            task_type="expert-prediction",
            dataset_type="moecast-trace",
            dataset_name=f"held-out requests of trace {str(manifest.trace_digest)[:12]}",
            metric_type=name,
            metric_value=value,
        )
        for name, value in manifest.metrics.items()
        if isinstance(value, float | int) and not isinstance(value, bool)
    ]
    data = ModelCardData(
        license=manifest.licence.lower(),
        library_name="moecast",
        tags=["moecast", "mixture-of-experts", "expert-prediction", manifest.kind],
        # A base model that is not on the Hub must not be linked there.
        base_model=model.model_id if "/" in model.model_id and ":" not in model.model_id else None,
        model_name=manifest.name if results else None,
        eval_results=results or None,
        moecast={"trace": manifest.trace_digest, "base": model.model_dump(exclude={"routers"})},
    )
    made_for = {
        "model": model.model_id,
        "revision": model.revision,
        "layers with routed experts": model.num_layers,
        "experts per layer": model.num_experts,
        "top_k": model.top_k,
        "hidden size": model.hidden_size,
        "dtype": model.dtype,
    }
    body = f"""# {manifest.name}

A `{manifest.kind}` predictor: it forecasts which experts `{model.model_id}` will route to, so that
their weights can be fetched before the layer needs them.

    moecast generate predictor={manifest.name} budget=50% prompt="..."

## Made for

{format_table(made_for)}

Quantisations of this model are served too; any other model, revision or shape is refused on load.
Signals that it needs while the model runs:
{", ".join(f"`{signal}`" for signal in manifest.signals) or "none"}.

## Measured on held-out requests

{format_table(manifest.metrics) if manifest.metrics else "Not measured."}

{DEFINITIONS}

`metrics.json` has every layer. Trained on the trace `{manifest.trace_digest}`; code version
{manifest.code_version}; made {manifest.created}.

## Export

{format_table(manifest.parity) if manifest.parity else "Nothing was exported from torch."}

{extra.strip()}

## Limits

The figures hold for the trace named above. Text of another kind is routed differently, which lowers
accuracy. A wrong forecast costs time and never changes the output.

Licence: {manifest.licence}.
"""
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}")).encode()


def write_front_page(cards: Mapping[str, bytes]) -> bytes:
    """Writes the page of a zoo, for storages that show one.

    A single entry's card is used as it is. Of several entries, the figures are listed so that the
    Hub shows all of them.
    """
    import yaml

    parsed = {}
    for name, data in cards.items():
        try:
            if data:
                parsed[name] = parse_card(data)
        except ZooError as error:
            log.warning("%s: %s", name, escape_controls(str(error)))
    if len(parsed) == 1 == len(cards):
        return next(iter(cards.values()))
    fronts = [card.data.to_dict() for card in parsed.values()]
    licences = {str(card.get("license")) for card in fronts}
    front: dict[str, object] = {
        "library_name": "moecast",
        "tags": ["moecast", "mixture-of-experts", "expert-prediction"],
        "license": licences.pop() if len(licences) == 1 else "other",
        "model-index": [model for card in fronts for model in card.get("model-index", [])],
    }
    bases = sorted({str(card["base_model"]) for card in fronts if card.get("base_model")})
    if bases:
        front["base_model"] = bases
    rows = "\n".join(f"| `{name}` |" for name in cards)
    body = f"""# Predictors of expert routing

Each forecasts which experts of a Mixture-of-Experts model will be needed, so that they can be \
fetched before the layer needs them (moecast).

| entry |
|---|
{rows}

    moecast zoo list zoo=hf://OWNER/REPO
    moecast zoo show hf://OWNER/REPO#NAME
"""
    return f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n{body}".encode()


def parse_card(data: bytes) -> "ModelCard":
    """Parses a card; raises ZooError if it is too long, no UTF-8, or its front matter is wrong."""
    from huggingface_hub import ModelCard

    if len(data) > MAX_CARD_BYTES:
        raise ZooError(f"README.md has {len(data):,} bytes; a card may have {MAX_CARD_BYTES:,}")
    try:
        return ModelCard(data.decode())
    except Exception as error:  # of YAML, of UTF-8, of the library that takes any keys
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ZooError(f"README.md is not a model card: {reason}") from error


def format_table(rows: Mapping[str, object]) -> str:
    lines = [
        f"| {name.replace('_', ' ')} | {format_figure(value)} |" for name, value in rows.items()
    ]
    return "\n".join(["| | |", "|---|---|", *lines])


def format_figure(value: object) -> str:
    """Formats a metric; None is "not measured"."""
    if value is None:
        return "not measured"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def check_card(data: bytes, manifest: EntryManifest) -> None:
    """Raises ZooError if the card is empty or its licence differs from the manifest."""
    card = parse_card(data)
    if not card.text.strip():
        raise ZooError("README.md is empty below its front matter")
    licence = card.data.to_dict().get("license")
    if licence != manifest.licence.lower():
        raise ZooError(f"README.md has the licence {licence!r}, manifest.json {manifest.licence!r}")
