"""The lines that connect clients, from the page that lists them."""

import re

from tests.docs.pages import DOCS

ADDRESS = "http://127.0.0.1:8000"
MODEL = "qwen2-moe-tiny"
SECTION = re.compile(r"^## (.+?)\n.*?```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOT_RUN = "Not run by tests"
INSTALLED = ("curl", "openai", "anthropic")
"""Clients of this project's own tests."""
PYTHON = {
    "langchain-openai": "langchain-openai", "litellm": "litellm", "instructor": "instructor",
    "pydantic-ai": "pydantic-ai-slim[openai]", "openai-agents": "openai-agents",
    "llama-index-llms-openai-like": "llama-index-llms-openai-like",
}  # fmt: skip
"""Clients whose lines are Python, with what is installed for them."""
PROGRAMS = ("llm", "mini-swe-agent")


def client_lines(url: str = ADDRESS) -> dict[str, str]:
    """Returns the lines of each client, for a server at this address."""
    text = (DOCS / "clients.md").read_text()
    return {name: lines.replace(ADDRESS, url) for name, lines in SECTION.findall(text)}
