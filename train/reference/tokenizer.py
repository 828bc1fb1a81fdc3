"""The reference model's own tokenizer: 8,192 byte-level BPE tokens."""

import random
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from train.reference.corpus import END_OF_TEXT, TURN_END, TURN_START

VOCAB_SIZE = 8_192
SAMPLE_CHARS = 24_000_000
"""BPE merges settle well before this much text; more only costs minutes."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def fit(sources: dict[str, list[str]], *, seed: int) -> Tokenizer:
    """Learns the merges from an even share of every source."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_sample(sources, seed=seed), trainer)
    return tokenizer


def _sample(sources: dict[str, list[str]], *, seed: int) -> Iterable[str]:
    share = SAMPLE_CHARS // len(sources)
    for name, texts in sources.items():
        taken = 0
        for text in random.Random(f"{seed}/{name}").sample(texts, len(texts)):
            if taken > share:
                break
            taken += len(text)
            yield text


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The same tokenizer as Transformers saves and loads it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START, TURN_END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2_048,
        padding_side="left",
    )
