"""Lines of a file as prompts; a bad one is named before anything runs."""

import json
from hashlib import sha256

import pytest
from transformers import Qwen2MoeConfig

from runtime.errors import PromptFileError
from runtime.generation.batch.prompts import BatchPrompt, PromptEncoder, parse_prompts, read_prompts


class WordTokenizer:
    """A token for each word, its length; a chat has its last message after a word of seven."""

    chat_template = "its own"

    def __call__(self, text, **_):
        return {"input_ids": [len(word) for word in text.split()]}

    def apply_chat_template(self, messages, **_):
        return "message " + messages[-1]["content"]


ENCODER = PromptEncoder(Qwen2MoeConfig(vocab_size=50, max_position_embeddings=20), WordTokenizer())


def read(tmp_path, *lines, **options):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\n".join(one if isinstance(one, bytes) else one.encode() for one in lines))
    return read_prompts(path, ENCODER, **{"max_new_tokens": 4, **options})[0]


def prompts(*rows):
    return [BatchPrompt(*row) for row in rows]


def test_read_prompts__takes_text_messages_and_ids(tmp_path):
    lines = [
        {"prompt": "to be or"},
        {"id": "b", "messages": [{"role": "user", "content": "not to"}], "max_new_tokens": 2},
        {"id": 9, "tokens": [3, 1], "max_new_tokens": 1},
    ]
    found = read(tmp_path, *map(json.dumps, lines[:2]), "", json.dumps(lines[2]), "")
    assert found == prompts((1, (2, 2, 2), 4), ("b", (7, 3, 2), 2), (9, (3, 1), 1))


def test_read_prompts__the_digest_is_of_the_bytes(tmp_path):
    path, content = tmp_path / "prompts.jsonl", b'{"prompt": "a"}\n\n'
    path.write_bytes(content)
    assert read_prompts(path, ENCODER, max_new_tokens=1)[1] == sha256(content).hexdigest()


BAD_LINES = [
    ("{", "not JSON"),
    (b'{"prompt": "\xff"}', "not JSON"),
    ("[1, 2]", "a list is not a prompt"),
    ('{"promt": "a"}', "unknown key 'promt'; known are id, prompt"),
    ('{"id": 1}', "has none of prompt, messages, tokens"),
    ('{"prompt": "a", "tokens": [1]}', "has prompt and tokens"),
    ('{"prompt": 3}', "prompt: it should be a valid string"),
    ('{"prompt": " "}', "prompt has no tokens"),
    ('{"tokens": []}', "tokens has no tokens"),
    ('{"tokens": [1, 50]}', "ids from 0 to 49"),
    ('{"tokens": [1, true]}', r"tokens.1: it should be a valid integer"),
    ('{"tokens": "12"}', "tokens: it should be a valid list"),
    ('{"messages": [{"role": "user"}]}', r"messages.0.content: Field required"),
    ('{"prompt": "a", "id": 1.5}', "id: it .* string or it .* integer"),
    ('{"prompt": "a", "max_new_tokens": 32.5}', "max_new_tokens: it should be a valid integer"),
    ('{"messages": [{"role": "user", "content": null}]}', "messages.0.content: Field"),
    ('{"messages": [{"role": "user", "content": 5}]}', "content: a int is neither a text"),
    ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "content: it has no text"),
    ('{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens: it .* greater than or"),
    (r'{"prompt": "\ud800"}', "prompt: .* surrogates not allowed"),
    (r'{"prompt": "a", "id": "\ud800"}', "id: .* surrogates not allowed"),
    ('{"prompt": "a", "max_new_tokens": 20}', "exceed the model's context of 20"),
    ('{"prompt": "a", "id": "x"}', r"id 'x' is already used by .* line 1"),
]


@pytest.mark.parametrize(("line", "said"), BAD_LINES)
def test_read_prompts__a_bad_line_is_named(tmp_path, line, said):
    with pytest.raises(PromptFileError, match=rf"line 3: .*{said}"):
        read(tmp_path, '{"prompt": "a", "id": "x"}', '{"prompt": "b"}', line, '{"prompt": "c"}')


def test_read_prompts__null_is_absence_and_floats_may_be_whole(tmp_path):
    """As data frames write columns with gaps."""
    lines = [
        {"id": None, "prompt": "a", "messages": None, "max_new_tokens": None, "source": None},
        {"id": 9.0, "tokens": [3.0, 1.0], "max_new_tokens": 3.0},
        {"messages": [{"role": "user", "content": "not to", "name": None}]},
        {"id": float("nan"), "prompt": "a", "max_new_tokens": float("nan")},
    ]
    expected = prompts((1, (1,), 4), (9, (3, 1), 3), (3, (7, 3, 2), 4), (4, (1,), 4))
    assert read(tmp_path, *map(json.dumps, lines)) == expected


def test_read_prompts__joins_parts_with_text_and_counts_the_others(tmp_path, caplog):
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    parts = [{"type": "text", "text": "not "}, image, {"type": "text", "text": "to"}]
    line = json.dumps({"messages": [{"role": "user", "content": parts}]})
    assert read(tmp_path, line, line) == prompts((1, (7, 3, 2), 4), (2, (7, 3, 2), 4))
    assert caplog.messages == ["2 parts of messages are no text and are left out (2 image_url)"]


def test_read_prompts__nothing_to_read_is_an_error(tmp_path):
    with pytest.raises(PromptFileError, match="contains no prompt"):
        read(tmp_path, "", " ")
    with pytest.raises(PromptFileError, match="No such file"):
        read_prompts(tmp_path / "none", ENCODER, max_new_tokens=1)


def test_given_prompts__are_numbered_by_their_places():
    given = ["a bc", [4, 5], [{"role": "user", "content": "abc"}], {"tokens": [1], "id": "own"}]
    ids = {one.id: one.tokens for one in parse_prompts(given, ENCODER, max_new_tokens=3)}
    assert list(ids.items()) == [(0, (1, 2)), (1, (4, 5)), (2, (7, 3)), ("own", (1,))]
    with pytest.raises(PromptFileError, match=r"prompts\[1\]: a int is not a prompt"):
        parse_prompts(["a", 3], ENCODER, max_new_tokens=3)


@pytest.mark.parametrize("given", ["one text", {"prompt": "one text"}])
def test_parse_prompts__one_prompt_is_no_list(given):
    with pytest.raises(PromptFileError, match="give a list"):
        parse_prompts(given, ENCODER, max_new_tokens=4)
