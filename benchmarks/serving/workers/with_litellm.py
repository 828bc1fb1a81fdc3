"""Checks of LiteLLM, which must not download its price list."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from checks import check, equal, read_request, refused, report

REQUEST = read_request()
COMMON = {
    "api_base": REQUEST["url"],
    "api_key": REQUEST["key"],
    "max_tokens": REQUEST["tokens"],
    "temperature": 0,
    "num_retries": 0,
}
CHAT = COMMON | {
    "model": f"openai/{REQUEST['model']}",
    "messages": [{"role": "user", "content": REQUEST["prompt"]}],
}
TEXT = COMMON | {
    "model": f"text-completion-openai/{REQUEST['model']}",
    "prompt": REQUEST["prompt"],
}


@check
def text_completion() -> None:
    answer = litellm.text_completion(**TEXT)
    equal(answer.choices[0].text, REQUEST["expected"])
    equal(answer.usage.completion_tokens, REQUEST["tokens"])


@check
def text_completion_stream() -> None:
    chunks = litellm.text_completion(**TEXT, stream=True)
    equal("".join(chunk.choices[0].text or "" for chunk in chunks), REQUEST["expected"])


@check
def chat() -> None:
    whole = litellm.completion(**CHAT).choices[0].message.content
    chunks = litellm.completion(**CHAT, stream=True)
    equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks), whole)


@check
def refusals() -> None:
    refused(litellm.AuthenticationError, lambda: litellm.completion(**CHAT | {"api_key": "other"}))
    refused(litellm.NotFoundError, lambda: litellm.completion(**CHAT | {"model": "openai/other"}))
    refused(litellm.BadRequestError, lambda: litellm.completion(**CHAT | {"top_p": 9}))


report("litellm")
