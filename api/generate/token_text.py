"""The text of each token, from the model server's own tokenizer; asked for once and kept."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import httpx

from api.service import ApiService

__all__ = ["texts"]

log = logging.getLogger("vllm_tap.api")

_KEPT_MAX: Final = 1 << 16
_AT_ONCE: Final = 8
_ANSWER_S: Final = 5.0


async def texts(service: ApiService, token_ids: Sequence[int]) -> list[str | None]:
    """One text for each id; None where the server does not say. A part of a character shows as U+FFFD."""
    known: OrderedDict[int, str] = service.token_texts
    unknown = [token for token in dict.fromkeys(token_ids) if token not in known]
    turns = asyncio.Semaphore(_AT_ONCE)

    async def ask(token: int) -> None:
        async with turns:
            answer = await service.upstream.post("/detokenize", json={"tokens": [token]}, timeout=_ANSWER_S)
            try:
                known[token] = str(answer.raise_for_status().json()["prompt"])
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
    found = [known.get(token) for token in token_ids]
    for token in token_ids:
        if token in known:
            known.move_to_end(token)
    while len(known) > _KEPT_MAX:
        known.popitem(last=False)
    return found
