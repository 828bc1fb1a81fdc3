"""Checks of OpenAI's own client."""

import asyncio

import openai
from checks import check, equal, read_request, refused, report

REQUEST = read_request()
MODEL, PROMPT, TOKENS = REQUEST["model"], REQUEST["prompt"], REQUEST["tokens"]
GREEDY = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": PROMPT}],
    "max_tokens": TOKENS,
    "temperature": 0,
}
client = openai.OpenAI(base_url=REQUEST["url"], api_key=REQUEST["key"], max_retries=0, timeout=120)


@check
def models() -> None:
    equal([model.id for model in client.models.list()], [MODEL])
    equal(client.models.retrieve(MODEL).id, MODEL)


@check
def completion() -> None:
    answer = client.completions.create(**GREEDY)
    equal(answer.choices[0].text, REQUEST["expected"])
    equal(answer.choices[0].finish_reason, "length")
    equal(answer.usage.completion_tokens, TOKENS)


@check
def completion_stream() -> None:
    chunks = list(
        client.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True})
    )
    equal("".join(chunk.choices[0].text for chunk in chunks if chunk.choices), REQUEST["expected"])
    equal(chunks[-1].choices, [])
    equal(chunks[-1].usage.completion_tokens, TOKENS)


@check
def completion_options() -> None:
    answer = client.completions.create(**GREEDY | {"n": 2, "logprobs": 3, "echo": True})
    equal(len(answer.choices), 2)
    for choice in answer.choices:
        equal(choice.text, PROMPT + REQUEST["expected"])
        equal(choice.logprobs.token_logprobs[0], None)
        assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs[1:])
        equal(len(choice.logprobs.tokens), len(choice.logprobs.text_offset))


@check
def stop() -> None:
    end = REQUEST["expected"][5:8]
    answer = client.completions.create(**GREEDY, stop=[end]).choices[0]
    equal(answer.text, REQUEST["expected"][: REQUEST["expected"].index(end)])
    equal(answer.finish_reason, "stop")


@check
def seed() -> None:
    drawn = [
        client.completions.create(**GREEDY | {"temperature": 1.2, "seed": 11}).choices[0].text
        for _ in range(2)
    ]
    equal(drawn[0], drawn[1])


@check
def chat() -> None:
    answer = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    choice = answer.choices[0]
    equal(choice.message.role, "assistant")
    equal(len(choice.logprobs.content), answer.usage.completion_tokens)
    parts = client.chat.completions.create(**CHAT, stream=True)
    texts = [part.choices[0].delta.content or "" for part in parts if part.choices]
    equal("".join(texts), choice.message.content)


@check
def raw_response() -> None:
    raw = client.completions.with_raw_response.create(
        **GREEDY, extra_headers={"X-Request-Id": "mine-1"}
    )
    equal(raw.headers["x-request-id"], "mine-1")
    equal(raw.parse().choices[0].text, REQUEST["expected"])


@check
def refusals() -> None:
    def complete(**changed: object) -> openai.types.Completion:
        return client.completions.create(**GREEDY | changed)

    refused(openai.NotFoundError, lambda: complete(model="another"))
    refused(openai.BadRequestError, lambda: complete(n=10**7))
    refused(openai.BadRequestError, lambda: complete(temperature=9))
    other = client.with_options(api_key="another")
    refused(openai.AuthenticationError, lambda: other.completions.create(**GREEDY))


@check
def several_at_once() -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=REQUEST["url"], api_key=REQUEST["key"], max_retries=0, timeout=120
        ) as parallel:
            answers = await asyncio.gather(
                *(parallel.completions.create(**GREEDY) for _ in range(8))
            )
        return [answer.choices[0].text for answer in answers]

    equal(set(asyncio.run(ask())), {REQUEST["expected"]})


report("openai")
