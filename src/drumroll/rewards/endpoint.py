"""A chat model behind an OpenAI-compatible URL: a service, or a server of your own."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from drumroll.errors import ConfigError, RewardError
from drumroll.rewards.rate import RateLimit
from drumroll.types import Message

RETRIES = 4
"""How often one request is sent again after a lost connection, a timeout, or an answer of 408, 409, 429 or 5xx."""

TokenLimitKey = Literal["max_tokens", "max_completion_tokens"]


class Endpoint:
    """A `Chat` that asks a server. Every request it sends, a repeated one too, takes its turn at the rate limit.

    Its errors name the URL and what the server said, and never the key.
    """

    def __init__(
        self, url: str, model: str, *, key: str, timeout_s: float, limit: RateLimit | None, token_limit_key: TokenLimitKey = "max_tokens"
    ) -> None:
        import openai

        async def wait_for_turn(_request: Any) -> None:
            if limit is not None:
                await limit.take()

        self.url = url
        self._model = model
        self._key = key
        self._token_limit_key = token_limit_key
        self._client = openai.AsyncOpenAI(
            base_url=url,
            api_key=key,
            max_retries=RETRIES,
            timeout=timeout_s,
            http_client=openai.DefaultAsyncHttpxClient(event_hooks={"request": [wait_for_turn]}),
        )

    async def complete(self, messages: Sequence[Message], *, max_new_tokens: int, temperature: float, seed: int | None = None) -> str:
        """The text of the server's answer; empty where it has none."""
        request: dict[str, Any] = {
            "model": self._model,
            "messages": [dict(message) for message in messages],
            "temperature": temperature,
            self._token_limit_key: max_new_tokens,
        }
        if seed is not None:
            request["seed"] = seed
        try:
            answer = await self._client.chat.completions.with_raw_response.create(**request)
        except Exception as error:  # the client's own errors, and whatever its transport lets through
            raise RewardError(f"{self.url} gave no answer for model '{self._model}': {self._told(error)}") from None
        try:
            content = answer.http_response.json()["choices"][0]["message"].get("content")
        except (ValueError, LookupError, TypeError, AttributeError):
            begin = self._censored(answer.http_response.text[:200])
            raise RewardError(
                f"{self.url} answered something that is no chat completion: {begin!r}. "
                f"Is it the base URL of an OpenAI-compatible API, such as http://localhost:8000/v1?"
            ) from None
        return content if isinstance(content, str) else ""

    def _told(self, error: Exception) -> str:
        """What went wrong, with the reason behind a lost connection, which the client's own message leaves out."""
        status = getattr(error, "status_code", None)
        told = f"{type(error).__name__}{f' ({status})' if status else ''}: {error}"
        if error.__cause__ is not None:
            told += f" ({type(error.__cause__).__name__}: {error.__cause__})"
        return self._censored(told)

    def _censored(self, text: str) -> str:
        return text.replace(self._key, "<key>")


def read_key(variable: str | None, url: str) -> str:
    """The key in an environment variable. A server that wants none, or that is on this machine, is sent the word `unused`."""
    key = os.environ.get(variable, "").strip() if variable is not None else ""
    if not key and variable is not None and not is_loopback(url):
        raise ConfigError(
            f"`api_key_env`: the environment variable {variable}, which should hold the key for {url}, is empty or not set in the process "
            f"that computes the reward. Set it before the run (and on every node before Ray starts there), or give `api_key_env: null` "
            f"for a server that wants no key."
        )
    return key or "unused"


def is_loopback(url: str) -> bool:
    """Whether the URL's host is this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
