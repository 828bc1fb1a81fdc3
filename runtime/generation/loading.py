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
    model.generate_many = functools.partial(_generate_many, model)
    return model


def _generate_many(
    model: PreTrainedModel, prompts: Iterable[Any], **options: Any
) -> "list[BatchResult]":
    # Imported here because serving one prompt at a time needs none of it.
    from runtime.generation.batch.generate_many import generate_many

    return generate_many(model, prompts, **options)
