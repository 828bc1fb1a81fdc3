"""The model card (README.md) of an entry, generated from its manifest and metrics."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from predictors.terminal import escape_controls
from zoo.errors import ZooError
from zoo.manifest import EntryManifest
from zoo.training_record import TrainingRecord

if TYPE_CHECKING:
    from huggingface_hub import ModelCard, ModelCardData

log = logging.getLogger(__name__)

MAX_CARD_BYTES = 1 << 20

DEFINITIONS = """\
* **accuracy**: mean over tokens of |predicted top_k and chosen| / top_k.
* **fetch_rate**: share of predicted experts whose bytes had all arrived before their layer was
  routed, in a replay of the held-out trace on the named hardware profile.
* **good_pred**: share of needed experts that were predicted x fetch_rate; layers that are not
  covered count 0."""


FIGURE = "figure.png"


@dataclass(frozen=True)
class CardFigure:
    """The figure of a card."""

    png: bytes
    caption: str


@dataclass(frozen=True)
class StoredCard:
    """A card as a zoo has it; empty if the entry has none, or it is damaged."""

    text: bytes = b""
    png: bytes | None = None


def write_card(
    manifest: EntryManifest,
    *,
    extra: str = "",
    training: TrainingRecord | None = None,
    figure: CardFigure | None = None,
) -> bytes:
    """Writes front matter for the Hub and a page; `extra` precedes the section on limits."""
    from huggingface_hub import ModelCard

    model = manifest.model
    made_for = {
        "model": model.model_id,
        "revision": model.revision,
        "layers with routed experts": model.num_layers,
        "experts per layer": model.num_experts,
        "top_k": model.top_k,
        "hidden size": model.hidden_size,
        "dtype": model.dtype,
    }
    drawn = "" if figure is None else f"![{figure.caption}]({FIGURE})\n\n*{figure.caption}*\n"
    body = f"""# {manifest.name}

A `{manifest.kind}` predictor: it forecasts which experts `{model.model_id}` will route to, so that
their weights can be fetched before the layer needs them.

    moecast generate predictor={manifest.name} budget=50% prompt="..."

## Made for

{format_table(made_for)}

Any other model, revision or shape is refused on load. Signals that it needs while the model runs:
{", ".join(f"`{signal}`" for signal in manifest.signals) or "none"}.

## Measured on held-out requests

{format_table(manifest.metrics) if manifest.metrics else "Not measured."}

{DEFINITIONS}

`metrics.json` has every layer.

{drawn}
## Training

{describe_training(manifest, training)}

## Export

{format_table(manifest.parity) if manifest.parity else "Nothing was exported from torch."}

{extra.strip()}

## Limits

The figures hold for the trace named above. Text of another kind is routed differently, which lowers
accuracy. A wrong forecast costs time and never changes the output.

Licence: {manifest.licence}.
"""
    front = card_data(manifest, training).to_yaml()
    return str(ModelCard(f"---\n{front}\n---\n\n{body}")).encode()


def card_data(manifest: EntryManifest, training: TrainingRecord | None) -> "ModelCardData":
    """Returns the card's metadata, as the Hub knows them."""
    from huggingface_hub import EvalResult, ModelCardData

    model = manifest.model
    trace = None if training is None else training.trace
    hub_dataset = None if trace is None else trace.hub_dataset
    dataset = "" if trace is None else f" ({trace.dataset})"
    figures = {
        name: value
        for name, value in manifest.metrics.items()
        if isinstance(value, float | int) and not isinstance(value, bool)
    }
    results = [
        EvalResult(
            task_type="expert-prediction",
            task_name="Prediction of routed experts",
            dataset_type=hub_dataset or "moecast-trace",
            dataset_name=f"held-out requests of trace {str(manifest.trace_digest)[:12]}{dataset}",
            dataset_split="held_out",
            dataset_args={"trace": manifest.trace_digest},
            metric_type=name,
            metric_name=name.replace("_", " "),
            metric_value=value,
        )
        for name, value in figures.items()
    ]
    # A base model that is not on the Hub must not be linked there.
    is_on_hub = "/" in model.model_id and ":" not in model.model_id
    return ModelCardData(
        license=manifest.licence.lower(),
        library_name="moecast",
        tags=["moecast", "mixture-of-experts", "expert-prediction", manifest.kind],
        base_model=model.model_id if is_on_hub else None,
        base_model_revision=model.revision if is_on_hub else None,
        datasets=None if hub_dataset is None else [hub_dataset],
        metrics=list(figures) or None,
        model_name=manifest.name if results else None,
        eval_results=results or None,
        moecast={
            "trace": manifest.trace_digest,
            "base": model.model_dump(exclude={"routers"}),
        },
    )


def describe_training(manifest: EntryManifest, training: TrainingRecord | None) -> str:
    """Returns the section on the training; that of earlier versions was not recorded."""
    made = f"code version {manifest.code_version}; made {manifest.created}"
    if training is None:
        return (
            f"Trained on the trace `{manifest.trace_digest}`; {made}. Command, seed and versions "
            "were not recorded, so it cannot be repeated."
        )
    trace = training.trace
    versions = [f"{name} {version}" for name, version in training.versions.items() if version]
    facts = {
        "trace": f"`{trace.digest}`",
        "prompts": f"{trace.dataset}, {trace.num_tokens:,} tokens",
        "seed": training.seed,
        "code revision": training.code_revision or f"none (moecast {manifest.code_version})",
        "versions": ", ".join([f"Python {training.python}", *versions]),
        "machine": f"{training.machine}, {training.threads} threads of torch",
    }
    command = training.command or "called from Python"
    return f"""    {command}

{format_table(facts)}

`training.json` has every option. With these versions the same options, trace and code give the same
weights. {made[0].upper()}{made[1:]}."""


FIGURES = "figures"
"""Folder of a zoo with the figures of its front page."""


def figure_path(name: str) -> str:
    """Returns the path in a zoo of the figure of an entry's latest version."""
    return f"{FIGURES}/{name}.png"


def write_front_page(cards: Mapping[str, StoredCard]) -> bytes:
    """Writes the page of a zoo, for storages that show one; its figures are at `figure_path`.

    A single entry's card is used as it is. Of several entries, the figures are listed so that the
    Hub shows all of them.
    """
    import yaml

    parsed = {}
    for name, card in cards.items():
        try:
            if card.text:
                parsed[name] = parse_card(card.text)
        except ZooError as error:
            log.warning("%s: %s", name, escape_controls(str(error)))
    if len(parsed) == 1 == len(cards):
        ((name, card),) = cards.items()
        return card.text.replace(f"]({FIGURE})".encode(), f"]({figure_path(name)})".encode())
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
    datasets = sorted({str(name) for card in fronts for name in card.get("datasets") or []})
    if datasets:
        front["datasets"] = datasets
    rows = "\n".join(f"| `{name}` |" for name in cards)
    drawn = "\n\n".join(
        f"## {name}\n\n![{name}]({figure_path(name)})" for name, card in cards.items() if card.png
    )
    body = f"""# Predictors of expert routing

Each forecasts which experts of a Mixture-of-Experts model will be needed, so that they can be \
fetched before the layer needs them (moecast).

| entry |
|---|
{rows}

    moecast zoo list zoo=hf://OWNER/REPO
    moecast zoo show hf://OWNER/REPO#NAME

{drawn}
"""
    return f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n{body.rstrip()}\n".encode()


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
