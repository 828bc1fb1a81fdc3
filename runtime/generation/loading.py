"""`runtime.load`: loads a model and gives it the methods of this package."""

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from runtime.engine import loading

if TYPE_CHECKING:
    from runtime.generation.batch.result_journal import BatchResult


@functools.wraps(loading.load)
def load(*args: Any, **options: Any) -> PreTrainedModel:
    model = loading.load(*args, **options)

    def generate_many(prompts: Iterable[Any], **settings: Any) -> "list[BatchResult]":
        # Imported here because serving one prompt at a time needs none of it.
        from runtime.generation.batch.generate_many import generate_many

        return generate_many(model, prompts, **settings)

    model.generate_many = generate_many
    return model
