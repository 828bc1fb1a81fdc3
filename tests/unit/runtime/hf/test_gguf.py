"""Models from files that llama.cpp's own tools wrote (`tests/builders/gguf_files`)."""

from dataclasses import replace
from operator import mul

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from configs.compose import compose_typed
from runtime.config import PackConfig, Quantise
from runtime.errors import CheckpointError, StoreError
from runtime.hf.dense_format import QuantisedRows
from runtime.hf.gguf_config import read_gguf_config
from runtime.hf.loading import load_stripped
from runtime.hf.tokens import context_length, load_tokenizer
from runtime.presets import find_model
from runtime.store import layout as expert_layout
from runtime.store.base import max_decoded_bytes, max_slot_bytes, name_format
from runtime.store.files import FileReader
from runtime.store.ggml import library
from runtime.store.gguf.header import read_header
from runtime.store.model_check import list_weight_files
from runtime.store.packed.store import open_store
from tests.builders.gguf_files import FILES, RECORDED, gguf_file, recorded
from tests.builders.gguf_files.parts import split_gguf
from tests.builders.packed import pack_model
from tests.builders.served import serve_logits, serving

RESIDENT = {"dtype": "float32", "budget": "100%", "system": "on-demand"}
LOADABLE = [name for name in FILES if not name.startswith("qwen2moe")]
"""Transformers 5.23 cannot load what llama.cpp's converter writes of Qwen2-MoE: it adds a dimension
to the shared expert's gate, which is there already."""


def load_with_transformers(file, dtype: torch.dtype) -> PreTrainedModel:
    """Transformers' own loading, with the experts' width, which its configuration leaves out."""
    options = {"config": read_gguf_config(file), "dtype": dtype, "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **options).eval()


@pytest.mark.parametrize("name", ["qwen3moe-Q4_0", "qwen35moe-Q4_0"])
def test_config__has_the_scaling_of_rotary_embeddings(name, monkeypatch):
    header = read_header(gguf_file(name))
    own = read_gguf_config(gguf_file(name)).rope_parameters
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 256}
    metadata = {f"{header.architecture}.rope.scaling.{key}": it for key, it in scaling.items()}
    longer = replace(header, metadata={**header.metadata, **metadata})
    monkeypatch.setattr("runtime.hf.gguf_config.read_header", lambda _: longer)
    config = read_gguf_config(gguf_file(name))
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert config.rope_parameters == own | expected
    assert context_length(config) == 4 * 256


# Of Qwen3.5, Transformers dequantises in bfloat16, which rounds more than once.
@pytest.mark.parametrize("name", [name for name in LOADABLE if not name.startswith("qwen35moe")])
def test_load_stripped__dense_weights_are_transformers_own(name):
    """In bfloat16; in float32 the logits below show it."""
    model = load_stripped(gguf_file(name), "bfloat16").model
    # Rows that are multiplied as the file has them stand for the weights that they are decoded to.
    parts = model.named_modules()
    rows = {f"{path}.weight": it.weight for path, it in parts if isinstance(it, QuantisedRows)}
    own = {key: it for key, it in model.state_dict().items() if it.numel()} | rows
    assert bool(rows) == ("F16" not in name)
    plain = load_with_transformers(gguf_file(name), torch.bfloat16).state_dict()
    assert {key for key in plain if ".experts." not in key} == set(own)
    for key, weight in own.items():
        assert torch.equal(weight, plain[key]), key


def test_load_stripped__reads_no_byte_of_an_expert(monkeypatch):
    file = gguf_file("qwen3moe-wide-Q4_K_M")
    read: list[tuple[int, int]] = []
    original = FileReader.read

    def record(self: FileReader, path, offset: int, target: memoryview, **what) -> None:
        read.append((offset, offset + len(target)))
        original(self, path, offset, target, **what)

    monkeypatch.setattr(FileReader, "read", record)
    stripped, tensors = load_stripped(file, "auto"), read_header(file).tensors.values()
    experts = [t for t in tensors if "_exps" in t.name]
    dense_bytes = sum(tensor.num_bytes for tensor in tensors if tensor not in experts)
    assert sum(end - start for start, end in read) == dense_bytes
    for tensor in experts:
        end = tensor.offset + tensor.num_bytes
        assert not [span for span in read if span[0] < end and span[1] > tensor.offset]
    read.clear()
    stripped.open_store().close()
    assert not read


def last_logits(model: PreTrainedModel, tokens: list[int], count: int = 1):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, -count:].float()


LLAMA_TOLERANCE = 0.035
"""Of logits, relative. llama.cpp quantises what all of its products get to eight bits with a scale
for each block, of 256 weights with K-quants: half a percent or more in each of a dozen products,
which add up as their root; here those of experts are quantised alike."""
NEAR_TIES = {"qwen35moe-Q4_0": 0.1}
"""Tolerances of files in which that decides a near tie of two experts for one of the tokens."""


@pytest.mark.parametrize("name", FILES)
def test_load__computes_what_llama_cpp_does(name):
    known = recorded(name)
    expected = torch.tensor(known["logits"])
    tolerance = NEAR_TIES.get(name, LLAMA_TOLERANCE)
    prompt, new = known["prompt"], known["new"]
    with serving(gguf_file(name), **RESIDENT) as model:
        found = last_logits(model, prompt)[0]
        logits = last_logits(model, [*prompt, *new[:-1]], len(new))
    assert (found - expected).norm() / expected.norm() < tolerance
    # At each of its steps, llama.cpp's token is the best here too, or one that rounding may prefer.
    chosen = logits[torch.arange(len(new)), new]
    spread = expected.norm() / len(expected) ** 0.5
    assert bool((logits.amax(-1) - chosen <= 3 * tolerance * spread).all())
    assert name in NEAR_TIES or int(logits[0].argmax()) == new[0]


@pytest.mark.parametrize("name", LOADABLE)
def test_load__without_the_library_it_computes_what_transformers_does(name, monkeypatch):
    """Bit by bit: rows are decoded to the weights that Transformers dequantises."""
    monkeypatch.setattr(library, "_open", lambda: (None, "it is away"))
    monkeypatch.setattr(library, "multiplies", lambda _: False)
    monkeypatch.setattr(expert_layout, "multiplies", lambda _: False)
    plain = load_with_transformers(gguf_file(name), torch.float32)
    tokens = recorded(name)["prompt"]
    with serving(gguf_file(name), **RESIDENT) as model:
        logits = last_logits(model, tokens, len(tokens))
    assert torch.equal(logits, last_logits(plain, tokens, len(tokens)))


@pytest.mark.parametrize("name", ["qwen3moe-Q4_0", "qwen3moe-wide-Q4_K_M"])
def test_load__no_budget_changes_a_bit(name):
    tokens, outputs = recorded(name)["prompt"], []
    store = load_stripped(gguf_file(name), "auto").open_store()
    besides = store.scratch_bytes + max_decoded_bytes(store)
    size = 2 * max_slot_bytes(store) + besides
    counts, sizes = store.experts_per_layer, [layout.num_bytes for layout in store.layouts]
    total = sum(map(mul, counts, sizes)) + besides  # Q4_K_M has experts of two sizes
    store.close()
    for budget in (size, total - 1, total):
        with serving(gguf_file(name), budget=budget, system="moecast") as model:
            new = model.generate(torch.tensor([tokens]), max_new_tokens=6, do_sample=False)
            steps = [last_logits(model, new[0, :end].tolist()) for end in range(4, 12)]
            outputs.append((new, torch.cat(steps)))
            stats, is_small = model.moecast.stats(), budget == size
            assert (stats["hits"] == 0) <= is_small
            assert (stats["arena_slots"] == sum(counts)) == (budget == total)
            if budget == total:  # everything was read before the first token
                assert stats["arena_bytes"] == total
                assert stats["misses"] == stats["bytes_moved"] == 0
    for other in outputs[1:]:
        assert all(map(torch.equal, other, outputs[0]))


@pytest.mark.parametrize("name", FILES)
def test_tokenizer__gives_the_tokens_that_llama_cpp_does(name):
    tokenizer, prompt = load_tokenizer(gguf_file(name)), RECORDED["prompt"]
    tokens = tokenizer(prompt)["input_ids"]
    assert tokens == recorded(name)["prompt"]
    assert tokenizer.decode(tokens) == prompt
    turn = [{"role": "user", "content": "the fox"}]
    chat = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"


def test_pack__quantises_a_file_of_plain_weights_and_no_other(tmp_path):
    output, how = tmp_path / "store", Quantise.Q8_0
    with pytest.raises(StoreError, match="are stored as they are read from it; leave it out"):
        pack_model(gguf_file("qwen2moe-Q4_0"), output, quantise=how)
    store = open_store(pack_model(gguf_file("qwen2moe-F16"), output, quantise=how), None)
    assert {name_format(layout) for layout in store.layouts} == {"Q8_0"}
    store.close()


def test_model__of_a_file_is_named_without_its_suffix():
    file = gguf_file("qwen3moe-Q4_0")
    composed, _ = compose_typed(PackConfig, [f"model={file}", "output=x"])
    for model in (find_model(file), composed.model):
        assert (model.name, model.id) == ("qwen3moe-Q4_0", str(file))


@pytest.mark.parametrize("name", ["qwen3moe-Q4_0", "qwen35moe-Q4_0"])
def test_load__a_file_in_parts_is_the_whole_one(tmp_path, name):
    parts = split_gguf(gguf_file(name), tmp_path, 3)
    tokens = torch.tensor([recorded(name)["prompt"]])
    files = gguf_file(name), parts[0]
    assert torch.equal(*(serve_logits(file, tokens, budget="50%") for file in files))
    assert list_weight_files(parts[0]) == parts


def test_read_header__parts_that_are_missing_or_of_another_model_are_named(tmp_path):
    parts = split_gguf(gguf_file("qwen3moe-Q4_0"), tmp_path, 3)
    with pytest.raises(CheckpointError, match="00002-of-00003.gguf is a later part of a model"):
        read_header(parts[1])
    (tmp_path / "other").mkdir()
    others = split_gguf(gguf_file("qwen2moe-Q4_0"), tmp_path / "other", 3)
    for replacement, message in (
        (parts[1], "00003-of-00003.gguf is not part 3 of .*00001-of-00003.gguf"),
        (others[2], "is not part 3 of|tensors; by its header they are"),
        (None, "00003-of-00003.gguf is missing, part 3 of 3 of a model"),
    ):
        parts[2].unlink()
        if replacement is not None:
            parts[2].write_bytes(replacement.read_bytes())
        with pytest.raises(CheckpointError, match=message):
            read_header(parts[0])
