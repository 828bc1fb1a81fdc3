"""The model card (README.md) of an entry, generated from its manifest and metrics."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predictors.table import Table, escape_controls
from zoo.errors import ZooError
from zoo.manifest import EntryManifest, is_number

if TYPE_CHECKING:
    from huggingface_hub import ModelCard, ModelCardData

log = logging.getLogger(__name__)

MAX_CARD_BYTES = 1 << 20

TEMPLATE, FRONT_PAGE = (
    Path(__file__).with_name(name) for name in ("card.jinja", "front_page.jinja")
)
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
    training: Mapping[str, Any] | None = None,
    figure: CardFigure | None = None,
) -> bytes:
    """Writes front matter for the Hub and a page; `extra` precedes the section on limits."""
    from huggingface_hub import ModelCard

    card = ModelCard.from_template(
        card_data(manifest, training),
        template_path=str(TEMPLATE),
        manifest=manifest,
        training=training,
        table=format_table,
        signals=", ".join(f"`{signal}`" for signal in manifest.signals),
        caption=figure and figure.caption,
        picture=FIGURE,
        facts=training and format_table(list_facts(manifest, training)),
        extra=extra.strip(),
    )
    return f"{card}\n".encode()


def card_data(manifest: EntryManifest, training: Mapping[str, Any] | None) -> "ModelCardData":
    """Returns the card's metadata, as the Hub knows them."""
    from huggingface_hub import EvalResult, ModelCardData

    model = manifest.model
    trace = training["trace"] if training else {}
    hub_dataset = trace.get("hub_dataset")
    dataset = f" ({trace['dataset']})" if trace else ""
    figures = {name: value for name, value in manifest.metrics.items() if is_number(value)}
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
        moecast={"trace": manifest.trace_digest, "base": model.model_dump(exclude={"routers"})},
    )


def list_facts(manifest: EntryManifest, training: Mapping[str, Any]) -> dict[str, object]:
    """Returns what the training was made from and on."""
    trace, made_with = training["trace"], training["versions"]
    versions = [f"{name} {version}" for name, version in made_with.items() if version]
    revision = training["code_revision"] or f"none (moecast {manifest.code_version})"
    return {
        "trace": f"`{trace['digest']}`",
        "prompts": f"{trace['dataset']}, {trace['num_tokens']:,} tokens",
        "seed": str(training["seed"]),
        "code revision": revision,
        "versions": ", ".join([f"Python {training['python']}", *versions]),
        "machine": f"{training['machine']}, {training['threads']} threads of torch",
    }


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
    from jinja2 import Template

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
    template = Template(FRONT_PAGE.read_text(), trim_blocks=True)
    drawn = [name for name, card in cards.items() if card.png]
    body = template.render(cards=list(cards), drawn=drawn, figure_path=figure_path)
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


def format_table(facts: Mapping[str, object]) -> str:
    """Returns a table in Markdown; empty without any facts."""
    names = {name.replace("_", " "): value for name, value in facts.items()}
    return "\n".join(Table.facts(names).markdown()) if names else ""


def check_card(data: bytes, manifest: EntryManifest) -> None:
    """Raises ZooError if the card is empty or its licence differs from the manifest."""
    card = parse_card(data)
    if not card.text.strip():
        raise ZooError("README.md is empty below its front matter")
    licence = card.data.to_dict().get("license")
    if licence != manifest.licence.lower():
        raise ZooError(f"README.md has the licence {licence!r}, manifest.json {manifest.licence!r}")
