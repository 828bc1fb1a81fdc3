"""Prompts repeat, and a source that cannot be read has an error that says what to do."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from collect import plan
from collect.config import DataConfig, SourceKind
from collect.errors import PromptError
from collect.plan import EncodedPrompt, RecordingSettings
from collect.prompts import cut_texts, digest_of, extract_prompt, load_prompts
from collect.traces.layout import Split, choose_split, prompt_digest


def json_lines(folder: Path, rows: list, **options) -> DataConfig:
    """A source that is a file of these rows."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(kind=SourceKind.JSONL, path=str(path), min_chars=1, **options)


@pytest.mark.parametrize("count", [10, 100, 500, 1500])
def test_pydocs__gives_about_as_many_as_asked(count: int) -> None:
    prompts = load_prompts(DataConfig(num_prompts=count))
    assert 0.9 * count <= len(prompts) <= count
    assert len(set(prompts)) == len(prompts)


def test_prompts__repeat_and_depend_on_the_seed() -> None:
    data = DataConfig(num_prompts=50)
    assert load_prompts(data, seed=3) == load_prompts(data, seed=3)
    assert load_prompts(data, seed=3) != load_prompts(data, seed=4)


@pytest.mark.parametrize("count", [3, 8])
def test_prompts__that_are_few_have_one_that_is_held_out(count: int) -> None:
    """By chance alone, most of these choices would have none."""
    for seed in range(30):
        prompts = load_prompts(DataConfig(num_prompts=count), seed=seed)
        assert len(prompts) == count
        assert Split.HELD_OUT in [choose_split(digest_of(prompt)) for prompt in prompts]


def test_prompts__are_all_taken_if_they_are_few(tmp_path: Path) -> None:
    texts = [f"a prompt with the number {i}" for i in range(60)]
    train = [text for text in texts if choose_split(prompt_digest(text)) is Split.TRAIN]
    data = json_lines(tmp_path, [{"prompt": text} for text in train], num_prompts=len(train))
    assert load_prompts(data) == train
    assert len(set(load_prompts(replace(data, num_prompts=5))) & set(train)) == 5


def test_cut__loses_and_repeats_nothing() -> None:
    text = " ".join(f"word{i}" for i in range(5_000))
    pieces = list(cut_texts([text], num_pieces=20, longest=10_000))
    assert " ".join(pieces) == text
    assert 18 <= len(pieces) <= 22


def test_cut__comes_through_a_text_without_spaces() -> None:
    assert "".join(cut_texts(["x" * 1_000], num_pieces=4, longest=500)) == "x" * 1_000


def test_jsonl__finds_the_usual_key_and_drops_doubles(tmp_path: Path) -> None:
    rows = [{"id": i, "question": f"how much is {i % 3} and {i % 3}"} for i in range(9)]
    assert load_prompts(json_lines(tmp_path, rows)) == [row["question"] for row in rows[:3]]


USER = {"role": "user", "content": "hey"}
TURNS = [{"from": "gpt", "value": "hi"}, {"from": "human", "value": "lo"}]
PARTS = [
    {"type": "text", "text": "look "},
    {"type": "image_url", "image_url": {"url": "data:,"}},
    {"type": "image_url", "text": None},
    {"type": "text", "text": "at this"},
]


USERS_WORDS = [
    ({"instruction": "Add", "input": "1 and 2"}, ["instruction", "input"], "Add\n\n1 and 2"),
    ({"instruction": "Sing", "input": ""}, ["instruction", "input"], "Sing"),
    ({"conversations": TURNS}, ["conversations"], "lo"),
    ({"conversation": [{"role": "user", "content": "hey"}]}, ["conversation"], "hey"),
    ({"turns": ["first", "second"]}, ["turns"], "first"),
    ({"conversation": []}, ["conversation"], ""),
    ({"messages": [{"role": "user", "content": PARTS}]}, [], "look at this"),
    ({"messages": [{"role": "user", "content": PARTS[1:2]}, USER]}, [], "hey"),
    ({"messages": [{"role": "user", "content": None}, USER]}, [], "hey"),
    ({"messages": [{"role": "user"}, {"role": "assistant", "content": "me"}]}, [], ""),
    ({"messages": json.dumps([{"role": "user", "content": PARTS}])}, [], "look at this"),
    ({"messages": "[a note] on bees"}, [], "[a note] on bees"),
    ({"conversations": [{"from": "human", "value": "lo", "content": None}]}, [], "lo"),
    ({"content": PARTS}, [], "look at this"),
    ({"prompt": USER}, [], "hey"),
    ({"prompt": None, "text": "there"}, [], "there"),
    ({"prompt": float("nan"), "text": "there"}, [], "there"),
    ({"prompt": None}, [], ""),
    ({"tokens": None, "prompt": "there"}, [], "there"),
    ({"tokens": [3.0, 1], "text": "there"}, [], (3, 1)),
    ({"tokens": ["over", "there"], "text": "over there"}, [], "over there"),
]


@pytest.mark.parametrize(("row", "fields", "expected"), USERS_WORDS)
def test_extract_prompt__takes_the_users_words(row, fields, expected) -> None:
    assert extract_prompt(row, fields, Counter(), where="here") == expected


NO_TEXTS = [
    ({"text": 5}, [], ": .*a int is neither a text nor a list of parts"),
    ({"text": "\ud800"}, [], ": .*surrogates not allowed"),
    ("\ud800", [], ": .*surrogates not allowed"),
    ({"id": 1, "prompt": "x"}, ["promt"], r".*has no promt; it has id, prompt.*data\.fields"),
]


@pytest.mark.parametrize(("row", "fields", "said"), NO_TEXTS)
def test_extract_prompt__what_is_no_text_names_the_record(row, fields, said) -> None:
    with pytest.raises(PromptError, match=f"^line 3{said}"):
        extract_prompt(row, fields, Counter(), where="line 3")


def test_records__parts_that_are_no_text_are_counted(tmp_path, monkeypatch, caplog) -> None:
    """The same of a file and of the Hub, whose rows have every key of any other."""
    contents = PARTS, None, [{"type": "image", "text": None}]
    rows = [{"messages": [{"role": "user", "content": content}]} for content in contents]
    monkeypatch.setattr("datasets.load_dataset", lambda *_args, **_options: rows)
    file = json_lines(tmp_path, rows, name="mine")
    for data in (file, replace(file, kind=SourceKind.HUB, path="owner/name")):
        caplog.clear()
        assert load_prompts(data) == ["look at this"]
        assert caplog.messages == [
            "data=mine: 3 parts of messages are no text and are left out (1 image, 2 image_url)",
            "data=mine: 2 of 3 records have no text",
        ]


def test_hub__out_of_reach_says_what_to_do() -> None:
    with pytest.raises(PromptError, match=r"tatsu-lab/alpaca.*Offline: data=pydocs.*data=jsonl"):
        load_prompts(DataConfig(name="alpaca", kind=SourceKind.HUB, path="tatsu-lab/alpaca"))


@pytest.mark.parametrize("kind", [SourceKind.JSONL, SourceKind.TEXT, SourceKind.HUB])
def test_source__without_its_path_names_the_key(kind: SourceKind) -> None:
    with pytest.raises(PromptError, match=r"data\.path="):
        load_prompts(DataConfig(kind=kind))


def make_prompts(lengths: list[int]) -> list[EncodedPrompt]:
    return [EncodedPrompt(i, "0" * 64, (1,) * length) for i, length in enumerate(lengths)]


def test_units__are_runs_of_prompts_within_the_size() -> None:
    settings = RecordingSettings(new_tokens=2, max_prompt_tokens=99, chat=False, shard_bytes=100)
    work = plan.split_units(make_prompts([3, 3, 50, 1, 1, 1]), settings, bytes_per_row=10)
    assert [[prompt.index for prompt in unit] for unit in work] == [[0, 1], [2], [3, 4, 5]]


def test_batches__put_like_lengths_together() -> None:
    unit = make_prompts([9, 1, 8, 2])
    assert [[p.index for p in batch] for batch in plan.make_batches(unit, 2)] == [[1, 3], [2, 0]]


def test_pysource__is_the_standard_library() -> None:
    texts = load_prompts(DataConfig(name="pysource", kind=SourceKind.PYSOURCE, num_prompts=40))
    assert len(texts) == 40
    assert sum("def " in text or "self" in text for text in texts) > 20


def test_text__takes_a_file_or_every_text_of_a_folder(tmp_path: Path) -> None:
    data = DataConfig(name="text", kind=SourceKind.TEXT, path=str(tmp_path))
    with pytest.raises(PromptError, match=r"the folder contains no \*\.txt"):
        load_prompts(data)
    (tmp_path / "deeper").mkdir()
    for name in ("b.txt", "deeper/a.txt", "c.md"):
        (tmp_path / name).write_text(f"{name} " * 40)
    for path, texts in ((tmp_path, {"b.txt", "deeper/a.txt"}), (tmp_path / "b.txt", {"b.txt"})):
        prompts = load_prompts(replace(data, path=str(path)))
        assert {word for prompt in prompts for word in prompt.split()} == texts


def encoded(prompts: list, longest: int) -> list[EncodedPrompt]:
    """Prompts as they are recorded, with a token for each character of a text."""

    def tokenizer(texts: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(map(ord, text)) for text in texts]}

    settings = RecordingSettings(new_tokens=0, max_prompt_tokens=longest, chat=False)
    return plan.encode_prompts(prompts, tokenizer, settings)  # type: ignore[arg-type]


def test_token_ids__stand_among_texts_and_are_taken_as_they_are(tmp_path: Path) -> None:
    """The lines of `moecast serve record=FILE`."""
    lines = [{"tokens": [5, 1, 7]}, {"prompt": "abcdef"}, {"tokens": [5, 1, 7]}, {"tokens": [5]}]
    prompts = load_prompts(json_lines(tmp_path, lines))
    assert prompts == [(5, 1, 7), "abcdef", (5,)]
    assert [one.tokens for one in encoded(prompts, 2)] == [(5, 1), (97, 98)]


def test_prompts__that_begin_another_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Turns of one conversation would be trained on and held out."""
    turns = [(1, 2), (9,), (1, 2, 3, 4, 5, 6), (1, 2, 3), (1, 2, 3, 4, 7), (2, 1), (1, 3)]
    kept = encoded(turns, 4)
    assert [one.index for one in kept] == [0, 1, 2, 3]
    assert [one.tokens for one in kept] == [(9,), (1, 2, 3, 4), (2, 1), (1, 3)]
    assert kept[1].digest == digest_of(turns[2])
    assert "3 of 7 prompts begin another one: left out" in caplog.text


def test_texts__that_begin_another_are_kept() -> None:
    """Texts are records of their own, and the digests of traces of them stay."""
    assert [one.tokens for one in encoded(["ab", "a", "abc"], 3)] == [(97, 98), (97,), (97, 98, 99)]


def test_texts__that_are_equal_after_the_cut_are_one(caplog: pytest.LogCaptureFixture) -> None:
    """They would be trained on and held out."""
    kept = encoded([(97, 98), "abc", "a", "abd", "ac", "acd"], 2)
    assert [(one.index, one.tokens) for one in kept] == [(0, (97, 98)), (1, (97,)), (2, (97, 99))]
    assert "3 of 6 prompts begin another one: left out" in caplog.text
    assert "differ only after 2 tokens are kept if you raise data.max_prompt_tokens" in caplog.text


@pytest.mark.parametrize("tokens", [[], [1.5], ["a"], [True], [-1], 5])
def test_token_ids__that_are_none_name_the_line(tmp_path: Path, tokens: object) -> None:
    with pytest.raises(PromptError, match=r"line 1: tokens must be a list of token ids"):
        load_prompts(json_lines(tmp_path, [{"tokens": tokens}]))
