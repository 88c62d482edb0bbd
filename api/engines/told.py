"""The header of an answer that says which engine gave it."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.engines.upstreams import ENGINE_HEADER

__all__ = ["TellEngine"]

_NAME = ENGINE_HEADER.lower().encode()


class TellEngine:
    """ASGI middleware: adds the name in ``request.state.engine``; what an engine itself says there is left out."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def told(message: Message) -> None:
            if message["type"] == "http.response.start" and (name := scope.get("state", {}).get("engine")):
                others = [(key, value) for key, value in message.get("headers", ()) if key.lower() != _NAME]
                message["headers"] = [*others, (_NAME, name.encode())]
            await send(message)

        await self.app(scope, receive, told if scope["type"] == "http" else send)
