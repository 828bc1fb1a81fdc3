"""Small tokenizers."""

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


def byte_fallback_tokenizer(*, strips: bool = True) -> PreTrainedTokenizerBase:
    """A tokenizer as Llama's, or as Gemma's, which strips no space at the beginning.

    Every byte is `<0xNN>`; the other tokens are a letter, spaces, nothing, and one that looks like
    an invalid byte.
    """
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    names += ["<unk>", "a", "\u2581b", "\u2581", "\ufffd", "", "c"]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *[decoders.Strip(" ", 1, 0)] * strips])
    tokenizer.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")
