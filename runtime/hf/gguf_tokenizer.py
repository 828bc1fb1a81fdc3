"""Makes a tokenizer of a GGUF file's metadata, which splits text as llama.cpp does.

Transformers builds it, for the architectures that it loads; it knows how some vocabularies split
text, and would split for all others as GPT-2 does.
"""

from pathlib import Path

from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from runtime.errors import CheckpointError

WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
MARKS = r"[!-/:-@\[-`{-~]"
TEXT = (
    MARKS + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2D}"
    r"\x{A790}-\x{A7FF}\x{AB30}-\x{AB68}\x{10570}-\x{105BC}\x{10D50}-\x{10D85}"
    r"\x{16E40}-\x{16EDF}\x{1D400}-\x{1DF2A}]]"
)
"""Cased letters of the Unicode version of DeepSeek's first vocabulary."""
HAN = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
EAST_ASIAN = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{30FF}\x{FF65}-\x{FF9F}"
    r"\x{2F00}-\x{2FDF}\x{E40}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}"
    r"\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
)
SPLITS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (WORDS,),
    "olmo": (WORDS,),
    "refact": (r"\p{N}", WORDS),
    "starcoder": (r"\p{N}", WORDS),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, r"\p{N}"),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?{CASED}+",
        r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
        r"\s+$",
        HAN,
        r"\p{N}+",
    ),
    "deepseek-v3": (r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+", TEXT),
    "exaone-moe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "afmoe": (r"\p{N}{1,2}(?=(?:\p{N}{3})*(?!\p{N}))|\p{N}{3}", EAST_ASIAN, TEXT),
}
"""Expressions that split text one after another, by the name of the vocabulary's kind, where
Transformers has none (llama.cpp, `src/llama-vocab.cpp`)."""
SAME_AS = {"glm4": "llama-bpe", "chatglm-bpe": "llama-bpe"}


def load_gguf_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer that a file's metadata describe.

    Raises:
        CheckpointError: how its vocabulary splits text is not known here.
    """
    # Imported here because they take megabytes, which other models do not need.
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    architecture, described, options = get_gguf_tokenizer(str(file))
    kind = described.get("pre_tokenizer_type", "default")
    kind = described["pre_tokenizer_type"] = SAME_AS.get(kind, kind)
    is_bytes = described.get("tokenizer_type") == "gpt2"
    if is_bytes and kind not in {*SPLITS, *GGUF_PRE_TOKENIZER_SPLITS}:
        raise CheckpointError(
            f"{file} says tokenizer.ggml.pre = {kind!r}, and how that splits text is not known "
            "here; give the original checkpoint, whose tokenizer.json says it"
        )
    # The tokenizers library panics where one is not in the vocabulary.
    vocabulary = set(described.get("tokens", ()))
    for merge in described.get("merges", ()):
        if not {merge.replace(" ", "", 1), *merge.split(" ", 1)} <= vocabulary:
            raise ValueError(f"the merge {merge!r} is not of its tokens")
    backend, _ = convert_gguf_tokenizer(architecture, described)
    if is_bytes and kind in SPLITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(one), behavior="isolated") for one in SPLITS[kind]),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)
