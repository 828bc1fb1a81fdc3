"""Makes the GGUF files of this folder, and records what llama.cpp computes with them.

Models are random; llama.cpp's own converter and quantiser write the files. Two environments:

    python -m tests.builders.gguf_files.make convert SOURCE WORK     with PyTorch and Transformers
    python -m tests.builders.gguf_files.make headers SOURCE WORK     with PyTorch and Transformers
    python tests/builders/gguf_files/make.py quantise WORK           with llama-cpp-python
    python -m tests.builders.gguf_files.make merges SOURCE WORK      with PyTorch and Transformers
    python -m tests.builders.gguf_files.make logits WORK             with llama-cpp-python and gguf
    python -m tests.builders.gguf_files.make tokens WORK             with llama-cpp-python and gguf

`convert` and `quantise` make the files, the others what `written` makes more of.
SOURCE is llama.cpp as in the source distribution of llama-cpp-python 0.3.36 (`vendor/llama.cpp`);
Transformers 5.23.0, torch 2.13.0 and gguf 0.19.0 made what is here.
"""

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORD = HERE / "recorded.json"
ARCHITECTURES = HERE / "architectures.json"
SPLITS = HERE / "splits.json"
KINDS_OF_VOCABULARY = (
    *("default", "gpt-2", "olmo", "refact", "starcoder", "deepseek-coder", "deepseek-llm"),
    *("deepseek-v3", "exaone-moe", "glm4", "chatglm-bpe", "llama-bpe", "gpt-4o", "qwen2", "qwen35"),
)
"""Not `afmoe`: llama.cpp leaves spaces before digits with them, the model's own tokenizer not."""
SEED = 20
PROMPT = "the quick brown fox jumps over the lazy dog"
NEW_TOKENS = 12
FILE_TYPES = {
    "qwen2moe": {"F16": None, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7},
    "qwen3moe": {"BF16": None, "Q4_0": 2},
    "qwen3moe-wide": {"Q4_K_M": 15, "Q5_K_M": 17},
    "qwen35moe": {"Q4_0": 2},
    "minimax-m2": {"Q4_0": 2},
}
"""Files of each model, with llama.cpp's number (`llama_ftype`) where its quantiser writes them."""
SIZES: dict[str, dict[str, int]] = {
    # All experts of a token are chosen: their weights add up to one in llama.cpp's graph of this
    # architecture and in a patched one alike (`benchmarks.environments`).
    "qwen2moe": {"num_experts_per_tok": 4},
    "qwen3moe": {"num_experts": 8},
    # Blocks of K-quants have 256 weights.
    "qwen3moe-wide": {"num_experts": 2, "hidden_size": 256},
}
"""Where they are not those of `models`."""


def train_bpe(texts: list[str], *, use_regex: bool = True, **options: Any) -> dict[str, Any]:
    """Train a tokenizer of bytes on texts; return its vocabulary and its merges."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False, **options)
    trained.train_from_iterator(texts, trainer)
    return json.loads(trained.to_str())["model"]


def save_tokenizer(folder: Path) -> int:
    """Save a small tokenizer of Qwen's kind; return the size of its vocabulary."""
    from transformers import Qwen2Tokenizer

    content = train_bpe([PROMPT] * 4, vocab_size=284)
    pairs = [tuple(pair) for pair in content["merges"]]
    tokenizer = Qwen2Tokenizer(vocab=content["vocab"], merges=pairs)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def save_model(name: str, folder: Path) -> None:
    """Save a random model in the Hub's layout."""
    import torch

    from tests.builders.gguf_files import models

    vocab_size = save_tokenizer(folder)
    sizes = {"hidden_size": 32, **SIZES.get(name, {})}
    width = sizes["hidden_size"]
    torch.manual_seed(SEED)
    model = models.make_model(
        name.removesuffix("-wide"), **sizes, vocab_size=vocab_size, eos_token_id=vocab_size - 1,
        moe_intermediate_size=width, intermediate_size=width,
        # Products keep the size of activations, so that rounding errors do not grow.
        initializer_range=0.5 / width**0.5,
    )  # fmt: skip
    if name == "minimax-m2":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.mlp.e_score_correction_bias, std=0.1)
    # Qwen3.5's norms multiply by one more than their weight.
    middle = 0.0 if name == "qwen35moe" else 1.0
    for key, parameter in model.named_parameters():
        if key.endswith("mlp.gate.weight"):
            torch.nn.init.normal_(parameter, std=0.5)
        elif "norm" in key:
            torch.nn.init.uniform_(parameter, middle - 0.5, middle + 0.5)
    model.save_pretrained(folder)


def run_converter(source: Path, *arguments: str) -> None:
    """Run llama.cpp's converter for a model with the tokenizer of `save_tokenizer`."""
    if str(source) not in sys.path:
        sys.path[:0] = [str(source), str(source / "gguf-py")]
    import convert_hf_to_gguf
    from conversion.base import TextModel

    # The converter knows pre-tokenizers by the hash of what the original tokenizers make of a
    # text, and some models by files of their tokenizer; this one is and splits as Qwen's does.
    TextModel.get_vocab_base_pre = lambda _model, _tokenizer: "qwen2"
    TextModel._set_vocab_sentencepiece = TextModel._set_vocab_gpt2
    TextModel._set_vocab_glm = TextModel._set_vocab_gpt2
    sys.argv = ["convert", *arguments]
    convert_hf_to_gguf.main()


def convert(source: Path, work: Path) -> None:
    """Write the models, and what llama.cpp's converter makes of them."""
    for name, kinds in FILE_TYPES.items():
        folder = work / name
        save_model(name, folder)
        for kind in ["F32", *(kind for kind in kinds if kind in ("F16", "BF16"))]:
            output = work / f"{name}-{kind}.gguf"
            options = ["--outtype", kind.lower(), "--outfile", str(output)]
            options += ["--no-mtp"] * (name == "qwen35moe")
            run_converter(source, str(folder), *options)
            if kind in kinds:
                (HERE / output.name).write_bytes(output.read_bytes())


def headers(source: Path, work: Path) -> None:
    """Keep the headers of what llama.cpp's converter makes of models of every architecture."""
    from tests.builders.gguf_files import models

    found = {}
    for name in models.MODELS:
        folder, output = work / f"{name}-model", work / f"{name}.gguf"
        models.save(name, folder, save_tokenizer(folder))
        options = ["--no-mtp"] * (name in ("qwen35moe", "qwen3next", "glm4moe"))
        run_converter(source, str(folder), "--outtype", "f32", "--outfile", str(output), *options)
        found[name] = read_shapes(output)
    save_architectures(found)


def save_architectures(headers: dict[str, Any]) -> None:
    lines = [f"{json.dumps(name)}: {json.dumps(header)}" for name, header in headers.items()]
    ARCHITECTURES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read_shapes(file: Path) -> dict[str, Any]:
    """Return the metadata of a file's architecture, and the tensors' shapes with a vocabulary of
    `written.VOCAB_SIZE`."""
    import gguf

    reader = gguf.GGUFReader(file)
    values = {key: field.contents() for key, field in reader.fields.items()}
    architecture = values["general.architecture"]
    vocab_size = len(values["tokenizer.ggml.tokens"])

    def shorten(value: Any) -> Any:
        return 64 if value == vocab_size else value

    prefix = f"{architecture}."
    own = {key: value for key, value in values.items() if key.startswith(prefix)}
    metadata = {key.removeprefix(prefix): shorten(value) for key, value in own.items()}
    tensors = {t.name: [shorten(int(size)) for size in reversed(t.shape)] for t in reader.tensors}
    return {"architecture": architecture, "metadata": metadata, "tensors": tensors}


def logits(work: Path) -> None:
    """Record llama.cpp's logits of a file of each architecture."""
    import llama_cpp

    from tests.builders.gguf_files import written

    for name, header in written.ARCHITECTURES.items():
        header["logits"] = {}
        for kind in ("F32", "MXFP4") if name == "gpt-oss" else ("F32",):
            file = written.write_gguf(name, work / f"{name}.gguf", experts=kind)
            model = open_model(llama_cpp, file)
            model.eval(written.PROMPT)
            values = model.scores[len(written.PROMPT) - 1].tolist()
            header["logits"][kind] = [round(value, 6) for value in values]
    save_architectures(written.ARCHITECTURES)


SPLIT_TEXT = (
    "Don't SHE'LL we're: x+=1;  if (a<=10) {\n\n\treturn a_b[12345] && 'ok'!\r\n}   \n  1234567 12 "
    "3.14 e=mc\u00b2 na\u00efve caf\u00e9 "
    "\u0441\u0442\u0440\u0430\u043d\u0430 \u03b1\u03b2 \u10d0\u10d1 "
    "\u0561\u0562 \u4f60\u597d\uff0c\u4e16\u3002\u3053\u3093\u30ab\u30bf \uc548\ub155 \u0e40\u0e01 "
    "\u2018q\u2019 ~!@#$%^&*()_+|<>?/ the the  the   end\n\n \n"
)


def merges(_source: Path, _work: Path) -> None:
    """Make merges that cross the borders of a text's words, so that tokens show the borders."""
    content = train_bpe([SPLIT_TEXT] * 3, use_regex=False, vocab_size=480, max_token_length=5)
    found = [" ".join(pair) for pair in content["merges"]]
    SPLITS.write_text(json.dumps({"text": SPLIT_TEXT, "merges": found, "tokens": {}}) + "\n")


def tokens(work: Path) -> None:
    """Record llama.cpp's tokens of the text for every kind of vocabulary."""
    import llama_cpp

    from tests.builders.gguf_files import written

    for pre in KINDS_OF_VOCABULARY:
        file = written.write_gguf("olmoe", work / f"{pre}.gguf", pre=pre)
        model = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
        found = model.tokenize(SPLIT_TEXT.encode(), add_bos=False, special=False)
        written.SPLITS["tokens"][pre] = found
    SPLITS.write_text(json.dumps(written.SPLITS) + "\n")


def quantise(work: Path) -> None:
    """Quantise the models with llama.cpp, and record its tokens and logits of every file."""
    import llama_cpp
    from llama_cpp import llama_cpp as library

    recorded = {}
    for name, kinds in FILE_TYPES.items():
        for kind, number in kinds.items():
            output = HERE / f"{name}-{kind}.gguf"
            if number is not None:
                parameters = library.llama_model_quantize_default_params()
                parameters.ftype, parameters.nthread = number, 1
                files = (str(path).encode() for path in (work / f"{name}-F32.gguf", output))
                assert not library.llama_model_quantize(*files, parameters)
            recorded[output.name] = record(llama_cpp, output)
    content = {"llama_cpp_python": llama_cpp.__version__, "prompt": PROMPT, "files": recorded}
    RECORD.write_text(json.dumps(content) + "\n")


def open_model(llama_cpp: Any, file: Path) -> Any:
    threads = {"n_threads": 1, "n_threads_batch": 1}
    exact = {"logits_all": True, "flash_attn": False, "type_k": 0, "type_v": 0}
    return llama_cpp.Llama(str(file), n_ctx=128, verbose=False, **threads, **exact)


def record(llama_cpp, file: Path) -> dict:
    """Return the prompt's tokens, the logits of its last position, and what is generated."""
    model = open_model(llama_cpp, file)
    prompt = model.tokenize(PROMPT.encode(), add_bos=False, special=True)
    model.eval(prompt)
    logits = model.scores[len(prompt) - 1].tolist()
    new = []
    for _ in range(NEW_TOKENS):
        new.append(int(model.scores[model.n_tokens - 1].argmax()))
        model.eval(new[-1:])
    return {"prompt": prompt, "new": new, "logits": [round(value, 5) for value in logits]}


if __name__ == "__main__":
    command, *paths = sys.argv[1:]
    globals()[command](*map(Path, paths))
