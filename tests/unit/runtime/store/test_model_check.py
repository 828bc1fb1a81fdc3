"""Models that cannot be served are refused from their JSON files, with what to do instead."""

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

from runtime.config import ModelConfig
from runtime.errors import CheckpointError
from runtime.hf.loading import read_config
from runtime.hf.tokens import load_tokenizer
from runtime.store import model_check
from runtime.store.hub_snapshot import explain_failure
from runtime.store.model_check import WEIGHTS_INDEX, check_folder, check_tokenizer, mentions_experts
from runtime.store.model_source import resolve
from tests.builders.families.build import tiny_config
from tests.builders.families.table import FAMILIES
from tests.builders.processes import ROOT, run_python

MOE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}
REFUSED = MOE | {"quantization_config": {"quant_method": "bitsandbytes"}}
DENSE = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}


def write_model(folder: Path, config: dict[str, Any], *, tensor: str = "lm_head.weight") -> Path:
    """Write a folder with a configuration and a safetensors file of one empty tensor."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({tensor: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m", MOE)


def refusal(model_id: Path | str, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve(ModelConfig(id=str(model_id), **options))
    return str(caught.value)


def test_resolve__a_folder_that_is_not_there_names_what_is(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "inflated", MOE)
    missing = f"no such folder or file, and a model of the Hub is ORG/NAME. {tmp_path} has inflated"
    assert missing in refusal(tmp_path / "infalted")
    assert "no such folder or file" in refusal("./infalted.gguf")
    assert f"give the model's folder, {folder}" in refusal(folder / "config.json")


def test_resolve__may_be_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder has the form of an id, and is searched for as both."""
    write_model(tmp_path / "runs/inflated", MOE)
    monkeypatch.chdir(tmp_path)
    message = refusal("runs/infalted")
    assert "download it from the Hub with model.local_only=false" in message
    assert "no such folder either: runs has inflated" in message


def test_resolve__a_folder_without_a_model_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert re.search(r"no config\.json, .*it is empty$", refusal(tmp_path / "empty"))
    (tmp_path / "notes.txt").write_text("")
    assert refusal(tmp_path).endswith("it has empty/, notes.txt")


POINTERS = ["config.json", "tokenizer.json", "model.safetensors", "vocab.txt", "model.gguf"]


@pytest.mark.parametrize("name", POINTERS)
def test_resolve__names_a_git_lfs_pointer(name: str, moe: Path) -> None:
    file = moe / name
    file.write_text("version https://git-lfs.github.com/spec/v1\nsize 9\n")
    message = refusal(file if file.suffix == ".gguf" else moe)
    assert message.startswith(f"{file} is a Git LFS pointer, not the file itself: run git lfs pull")


def test_resolve__an_adapter_is_not_left_out_in_silence(tmp_path: Path) -> None:
    for name, config in {"moe": MOE, "dense": DENSE}.items():
        folder = write_model(tmp_path / name, config)
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        assert "which moecast does not apply. Merge it into the weights" in refusal(folder)
        (folder / "config.json").unlink()
        assert "has an adapter (adapter_config.json)" in refusal(folder)


DEEP = "[" * 200_000


DAMAGED = [
    ("config.json", ["{", "[]", "null", DEEP, "\0\0"]),
    ("generation_config.json", ["", "{", "[]"]),
    (WEIGHTS_INDEX, ["{", "[]", "{}", '{"weight_map": ["x"]}', DEEP]),
]


@pytest.mark.parametrize(("name", "texts"), DAMAGED)
def test_resolve__any_damage_of_a_file_names_it(name: str, texts: list[str], moe: Path) -> None:
    if name == WEIGHTS_INDEX:
        (moe / "model.safetensors").unlink()
    for text in texts:
        (moe / name).write_text(text)
        assert f"{name} is damaged" in refusal(moe)


OTHER_TYPES = {"num_hidden_layers": "many", "hidden_size": [], "rope_parameters": [1]}


@pytest.mark.parametrize(("field", "value"), [*OTHER_TYPES.items(), ("layer_types", 3)])
def test_read_config__values_of_other_types_name_the_file(field, value, tmp_path):
    folder = write_model(tmp_path / "m", MOE | {field: value})
    (folder / "tokenizer.json").write_text("{}")
    for read in (read_config, load_tokenizer):
        with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
            read(folder)


TOKENIZERS = ["{", "[]", "{}", '{"model": 3}', '{"model": {"type": "BPE"}}', DEEP]


@pytest.mark.parametrize("text", TOKENIZERS)
def test_load_tokenizer__any_damage_names_the_folder(text: str, moe: Path) -> None:
    (moe / "tokenizer.json").write_text(text)
    (moe / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(CheckpointError, match="its tokenizer cannot be read"):
        load_tokenizer(moe)


def test_resolve__other_weight_formats_are_named(moe: Path) -> None:
    (moe / "model.safetensors").rename(moe / "pytorch_model.bin")
    message = refusal(moe)
    assert "no model.safetensors and no model.safetensors.index.json" in message
    assert "it has config.json, pytorch_model.bin" in message


def test_resolve__a_folder_of_gguf_files_names_one(tmp_path: Path) -> None:
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    message = f"give one of them, such as {tmp_path}/model-Q4_K_M.gguf"
    assert message in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    assert message in refusal(tmp_path)


def test_resolve__a_dense_model_is_for_plain_transformers(tmp_path: Path) -> None:
    message = refusal(write_model(tmp_path / "m", DENSE))
    assert "not a Mixture-of-Experts model: LlamaForCausalLM has no experts" in message
    assert "plain Transformers" in message
    # Only the names of the weights tell: nothing is refused that may have experts.
    folder = write_model(tmp_path / "n", DENSE, tensor="model.layers.0.mlp.experts.3.w1.weight")
    assert resolve(ModelConfig(id=str(folder))) == folder


def test_mentions_experts__every_family_is_recognised() -> None:
    for name, family in FAMILIES.items():
        assert mentions_experts(json.loads(tiny_config(family).to_json_string())), name


def compressed(**weights: Any) -> dict[str, Any]:
    """The configuration that compressed-tensors writes, with one group of weights."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "actorder": None, **weights}
    return {"format": "pack-quantized", "config_groups": {"group_0": {"weights": weights}}}


QUANTISATIONS = [
    ({"quant_method": "awq", "version": "gemv"}, "AWQ and version='gemv'"),
    ({"quant_method": "gptq", "bits": 2}, "GPTQ and bits=2"),
    ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "GPTQ and desc_act=True"),
    ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ({"quant_method": "compressed-tensors"}, "0 kinds of weights"),
    (compressed(type="float", num_bits=8), "compressed-tensors and weights.type='float'"),
    (compressed(actorder="group"), "compressed-tensors and weights.actorder='group'"),
    ({**compressed(), "format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized'"),
    ({"quant_method": "nvfp4"}, "nvfp4"),
    ({**compressed(num_bits=4), "transform_config": {"a": 1}}, "transform_config="),
    ({**compressed(num_bits=4), "sparsity_config": {"format": "sparse-24"}}, "'sparse-24'"),
]


@pytest.mark.parametrize(("quantization", "name"), QUANTISATIONS)
def test_resolve__quantised_folders_name_the_way_out(tmp_path, quantization, name):
    card = "---\nlicense: mit\nbase_model:\n- Qwen/Qwen3-30B-A3B\n---\n# Quantised\n"
    folder = write_model(tmp_path / "m", {**MOE, "quantization_config": quantization})
    (folder / "README.md").write_text(card)
    said = rf"is quantised with .*{re.escape(name)}.*served.* Use the original checkpoint, "
    way_out = "Qwen/Qwen3-30B-A3B, instead.* moecast pack MODEL output=FOLDER quantise=int4"
    assert re.search(said + way_out, refusal(folder))
    with pytest.raises(CheckpointError, match="is quantised with"):
        check_folder(folder, with_weights=False)  # what doctor plans from
    (folder / "README.md").unlink()
    assert "Use the original checkpoint instead" in refusal(folder)


def test_check_tokenizer__says_what_the_folder_has(moe: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer.*it has config.json, model.safet"):
        check_tokenizer(moe)
    (moe / "tokenizer.json").write_text("{}")
    check_tokenizer(moe)
    (moe / "tokenizer.json").rename(moe / "tokenizer_config.json")
    with pytest.raises(CheckpointError, match="it has no vocabulary"):
        load_tokenizer(moe)


def test_code_of_a_checkpoint__is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = AssertionError("nothing may be asked on stdin")
    monkeypatch.setattr("builtins.input", Mock(side_effect=asked))
    code = {"auto_map": {"AutoConfig": "new.NewConfig", "AutoTokenizer": ["new.Tokens", None]}}
    folder = write_model(tmp_path / "m", {**MOE, "model_type": "new_moe", **code})
    (folder / "new.py").write_text("raise AssertionError('this ran')")
    with pytest.raises(CheckpointError, match="no model of type 'new_moe'.* is never run"):
        read_config(folder)
    (folder / "config.json").write_text(json.dumps({**MOE, "model_type": "new_moe"}))
    (folder / "tokenizer_config.json").write_text(json.dumps(code))
    with pytest.raises(CheckpointError, match="code that the checkpoint brings, .* never run"):
        load_tokenizer(folder)
    # Transformers has this model itself: its own class is used.
    folder = write_model(tmp_path / "n", {**MOE, **code})
    assert type(read_config(folder)).__name__ == "Qwen3MoeConfig"


def test_read_config__a_newer_model_type_names_both_versions(tmp_path: Path) -> None:
    config = MOE | {"model_type": "qwen9_moe", "transformers_version": "6.1.0"}
    said = r"Transformers 5\.\S+, which is installed here, .* 'qwen9_moe' .the .* with 6\.1\.0"
    with pytest.raises(CheckpointError, match=said):
        read_config(write_model(tmp_path / "m", config))


REFUSE = """
import sys
from configs.program import run_program
for model in sys.argv[1:]:
    for command in ("generate", "serve", "bench", "pack"):
        output = ["output=packed"] if command == "pack" else []
        assert run_program("runtime", [command, f"model.id={model}", *output]) == 2
heavy = {"torch", "transformers", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""


def test_commands__refuse_a_model_before_heavy_imports(tmp_path: Path) -> None:
    dense = write_model(tmp_path / "dense", DENSE)
    models = [tmp_path / "missing", dense, write_model(tmp_path / "refused", REFUSED)]
    done = run_python("-c", REFUSE, *models, folder=tmp_path, environment={"PYTHONPATH": str(ROOT)})
    assert done.stderr.count("error: ") == 12


# ---- the Hub


def test_explain_failure__has_the_reason_of_the_hub_and_what_to_do() -> None:
    response = httpx.Response(403, request=httpx.Request("GET", "https://huggingface.co"))
    config = ModelConfig(id="org/model", local_only=False)
    error = GatedRepoError("Cannot access it.\n", response=response)
    error.__cause__ = httpx.HTTPError("403")
    message = explain_failure(config, error)
    assert message.startswith("model 'org/model': Cannot access it. Check the spelling")
    assert "hf auth login, or set HF_TOKEN, and accept its terms" in message
    assert message.endswith("https://huggingface.co/org/model")


def test_resolve__without_a_network_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids" in refusal("org/model", local_only=False)
    monkeypatch.setenv("MOECAST_OFFLINE", "1")
    assert "MOECAST_OFFLINE forbids" in refusal("org/model", local_only=False)
    assert "model.local_only=false" in refusal("org/model")


def test_resolve__an_unreachable_hub_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("not here") from httpx.ConnectError("no route to host")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    message = refusal("org/model", local_only=False)
    assert "could not be downloaded (ConnectError: no route to host). Check the network" in message


def test_resolve__a_quantised_repository_is_refused_before_its_weights(tmp_path, monkeypatch):
    fetched = write_model(tmp_path / "m", REFUSED) / "config.json"
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(fetched))
    message = refusal("org/model-BNB", local_only=False)
    assert "org/model-BNB is quantised with bitsandbytes" in message


def test_resolve__fp8_names_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "m", MOE | {"quantization_config": {"quant_method": "fp8"}})
    assert resolve(ModelConfig(name="m", id=str(folder))) == folder
    monkeypatch.setattr(model_check, "find_spec", lambda _: None)
    assert "pip install 'moecast[fp8]'" in refusal(str(folder))


def test_mentions_experts__of_any_depth() -> None:
    config: object = {"num_experts": 4}
    for _ in range(5000):
        config = {"a": [config]}
    assert mentions_experts(config)
    assert not mentions_experts({"a": [{"num_experts": 0}]})
