"""Cards as the Hub's own parser reads them, and the training that they tell."""

import json
from pathlib import Path

from huggingface_hub import ModelCard

from tests.builders.entries import tiny_entry, tiny_figure, tiny_spec, tiny_training
from tests.builders.zoos import publish
from zoo.catalog import WritableZoo
from zoo.entry import open_entry
from zoo.index import parse_reference


def card_of(folder: Path, **changes) -> ModelCard:
    tiny_entry(folder, **changes)
    return ModelCard.load(folder / "README.md")


def test_card__has_the_metadata_of_the_hub(tmp_path: Path) -> None:
    spec = tiny_spec(model_id="Org/Tiny-MoE", revision="b" * 40)
    training = tiny_training(hub_dataset="tatsu-lab/alpaca")
    metrics = {"held_out": {"accuracy": 0.9, "good_pred": None}}
    card = card_of(tmp_path / "e", spec=spec, training=training, metrics=metrics)
    assert card.data.base_model == "Org/Tiny-MoE"
    assert card.data.to_dict()["base_model_revision"] == "b" * 40
    assert (card.data.library_name, card.data.datasets) == ("moecast", ["tatsu-lab/alpaca"])
    assert (card.data.license, card.data.metrics) == ("apache-2.0", ["accuracy"])
    assert {"moecast", "mixture-of-experts", "stride"} <= set(card.data.tags)
    assert card.data.model_name == "tiny/stride"
    (result,) = card.data.eval_results  # what was not measured is no result
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.9)
    assert (result.task_type, result.dataset_type) == ("expert-prediction", "tatsu-lab/alpaca")
    assert (result.dataset_split, result.dataset_args) == ("held_out", {"trace": "a" * 64})


def test_card__links_and_tells_nothing_that_is_not_there(entry: Path) -> None:
    card = ModelCard.load(entry / "README.md")
    assert "so it cannot be repeated" in card.text
    assert "![" not in card.text
    assert "training.json" not in open_entry(entry).manifest.files
    front = card.data.to_dict()
    assert not {"base_model", "base_model_revision", "datasets"} & front.keys()
    assert front["moecast"]["base"]["revision"] == "r1"


def test_card__tells_how_the_entry_was_trained(tmp_path: Path) -> None:
    training = tiny_training()
    card = card_of(tmp_path / "e", training=training, figure=tiny_figure())
    for text in (
        *("    moecast train tiny seed=7", f"`{'a' * 64}`", "| seed | 7 |"),
        *(f"| code revision | {'c' * 40} |", "torch 2.13.0, transformers 5.0.0, lightning 2.6.6"),
        *("`training.json` has every option", "![Accuracy by layer](figure.png)"),
    ):
        assert text in card.text
    entry = open_entry(tmp_path / "e")
    assert json.loads(entry.read("training.json")) == training
    assert entry.read("figure.png") == tiny_figure().png
    assert not {"training.json", "figure.png"} & entry.payload().keys()


def test_front_page__shows_the_figures_of_the_entries_that_there_are(hub):
    def page(*figures: str) -> bytes:
        _, files = hub[1].head("publisher/zoo")
        paths = [f"figures/{name}.png" for name in figures]
        assert sorted(path for path in files if path.startswith("figures/")) == paths
        assert all(f"]({path})".encode() in files["README.md"] for path in paths)
        return files["README.md"]

    for kind in ("mlp", "stride"):
        publish(hub[0], name=f"tiny/{kind}", figure=tiny_figure())
    page("tiny/mlp", "tiny/stride")
    WritableZoo(hub[0]).remove(parse_reference("tiny/mlp"))
    assert page("tiny/stride").count(b"![") == 1
    publish(hub[0], created="2026-02-01T00:00:00+00:00")
    assert b"![" not in page()
