"""OpenAI's own client, as it is installed."""

import asyncio

import openai
from checks import check, equal, order, refused, report

TOLD = order()
MODEL, PROMPT, TOKENS = TOLD["model"], TOLD["prompt"], TOLD["tokens"]
GREEDY = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": PROMPT}],
    "max_tokens": TOKENS,
    "temperature": 0,
}
client = openai.OpenAI(base_url=TOLD["url"], api_key=TOLD["key"], max_retries=0, timeout=120)


@check
def models() -> None:
    equal([one.id for one in client.models.list()], [MODEL])
    equal(client.models.retrieve(MODEL).id, MODEL)


@check
def completion() -> None:
    answer = client.completions.create(**GREEDY)
    equal(answer.choices[0].text, TOLD["expected"])
    equal(answer.choices[0].finish_reason, "length")
    equal(answer.usage.completion_tokens, TOKENS)


@check
def completion_stream() -> None:
    chunks = list(
        client.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True})
    )
    equal("".join(one.choices[0].text for one in chunks if one.choices), TOLD["expected"])
    equal(chunks[-1].choices, [])
    equal(chunks[-1].usage.completion_tokens, TOKENS)


@check
def completion_options() -> None:
    answer = client.completions.create(**GREEDY | {"n": 2, "logprobs": 3, "echo": True})
    equal(len(answer.choices), 2)
    for one in answer.choices:
        equal(one.text, PROMPT + TOLD["expected"])
        equal(one.logprobs.token_logprobs[0], None)
        assert all(logprob <= 0 for logprob in one.logprobs.token_logprobs[1:])
        equal(len(one.logprobs.tokens), len(one.logprobs.text_offset))


@check
def stop() -> None:
    end = TOLD["expected"][5:8]
    answer = client.completions.create(**GREEDY, stop=[end]).choices[0]
    equal(answer.text, TOLD["expected"][: TOLD["expected"].index(end)])
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
    said = answer.choices[0]
    equal(said.message.role, "assistant")
    equal(len(said.logprobs.content), answer.usage.completion_tokens)
    parts = client.chat.completions.create(**CHAT, stream=True)
    told = [one.choices[0].delta.content or "" for one in parts if one.choices]
    equal("".join(told), said.message.content)


@check
def raw_response() -> None:
    raw = client.completions.with_raw_response.create(
        **GREEDY, extra_headers={"X-Request-Id": "mine-1"}
    )
    equal(raw.headers["x-request-id"], "mine-1")
    equal(raw.parse().choices[0].text, TOLD["expected"])


@check
def refusals() -> None:
    def asked(**changed: object) -> openai.types.Completion:
        return client.completions.create(**GREEDY | changed)

    refused(openai.NotFoundError, lambda: asked(model="another"))
    refused(openai.BadRequestError, lambda: asked(max_tokens=10**7))
    refused(openai.BadRequestError, lambda: asked(temperature=9))
    stranger = client.with_options(api_key="another")
    refused(openai.AuthenticationError, lambda: stranger.completions.create(**GREEDY))


@check
def several_at_once() -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=TOLD["url"], api_key=TOLD["key"], max_retries=0, timeout=120
        ) as many:
            answers = await asyncio.gather(*(many.completions.create(**GREEDY) for _ in range(8)))
        return [answer.choices[0].text for answer in answers]

    equal(set(asyncio.run(ask())), {TOLD["expected"]})


report("openai")
