"""The text of each token, from the model server's own tokenizer; asked for once and kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import httpx

from api.engines.upstreams import Upstream
from api.service import ApiService

__all__ = ["texts"]

log = logging.getLogger("vllm_tap.api")

_AT_ONCE: Final = 8
_ANSWER_S: Final = 5.0


async def texts(service: ApiService, upstream: Upstream, tokenizer: str, token_ids: Sequence[int]) -> list[str | None]:
    """One text for each id; None where the server does not say. A part of a character shows as U+FFFD."""
    found = {token: service.token_texts.get((upstream.name, tokenizer, token)) for token in token_ids}
    unknown = [token for token, text in found.items() if text is None]
    turns = asyncio.Semaphore(_AT_ONCE)

    async def ask(token: int) -> None:
        async with turns:
            answer = await upstream.client.post("/detokenize", json={"tokens": [token]}, timeout=_ANSWER_S)
            try:
                found[token] = text = str(answer.raise_for_status().json()["prompt"])
                service.token_texts.put((upstream.name, tokenizer, token), text)
            except httpx.HTTPStatusError as error:
                if error.response.status_code not in (400, 422):
                    raise
                log.info("no text for token %d: %r", token, error)  # of this one alone

    try:
        async with asyncio.TaskGroup() as asking:
            for token in unknown:
                asking.create_task(ask(token))
    except* (httpx.HTTPError, ValueError, KeyError, TypeError) as errors:
        log.info("no text for %d tokens: %r", len(unknown), errors.exceptions[0])
    return [found[token] for token in token_ids]
