"""LiteLLM, as it is installed; it must not ask its makers for prices first."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from checks import check, equal, order, refused, report

TOLD = order()
COMMON = {
    "api_base": TOLD["url"],
    "api_key": TOLD["key"],
    "max_tokens": TOLD["tokens"],
    "temperature": 0,
    "num_retries": 0,
}
CHAT = COMMON | {
    "model": f"openai/{TOLD['model']}",
    "messages": [{"role": "user", "content": TOLD["prompt"]}],
}
TEXT = COMMON | {
    "model": f"text-completion-openai/{TOLD['model']}",
    "prompt": TOLD["prompt"],
}


@check
def text_completion() -> None:
    answer = litellm.text_completion(**TEXT)
    equal(answer.choices[0].text, TOLD["expected"])
    equal(answer.usage.completion_tokens, TOLD["tokens"])


@check
def text_completion_stream() -> None:
    chunks = litellm.text_completion(**TEXT, stream=True)
    equal("".join(one.choices[0].text or "" for one in chunks), TOLD["expected"])


@check
def chat() -> None:
    whole = litellm.completion(**CHAT).choices[0].message.content
    chunks = litellm.completion(**CHAT, stream=True)
    equal("".join(one.choices[0].delta.content or "" for one in chunks), whole)


@check
def refusals() -> None:
    refused(litellm.AuthenticationError, lambda: litellm.completion(**CHAT | {"api_key": "other"}))
    refused(litellm.NotFoundError, lambda: litellm.completion(**CHAT | {"model": "openai/other"}))
    refused(litellm.BadRequestError, lambda: litellm.completion(**CHAT | {"max_tokens": 10**7}))


report("litellm")
