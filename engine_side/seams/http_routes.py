"""vLLM's own HTTP routes: what names a capture there and would not be captured is refused, on any of them.

The middleware stands next to the routes, so that keys are asked for before it and the service of captures, where there
is one, has taken what is its own. A batch file (``vllm run-batch``) is requests for the same routes, which it calls
without HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from engine_side.front.unheard import Unheard, check_batch
from engine_side.seams.patching import is_there, wrap_when_imported


def connect() -> None:
    """Install the wrappers."""
    wrap_when_imported("vllm.entrypoints.serve", {"register_vllm_serve_api_routers": _register})
    wrap_when_imported(batch_module(), {"read_file": _read_batch})


def batch_module() -> str:
    """The module of ``vllm run-batch`` in this vLLM."""
    new = "vllm.entrypoints.launchers.run_batch"
    return new if is_there(new) else "vllm.entrypoints.openai.run_batch"


def _register(original: Callable[..., Any]) -> Callable[..., Any]:
    def register(app: Any, *args: Any, **kwargs: Any) -> Any:
        app.add_middleware(Unheard, fields=lambda scope: request_fields(app, scope))
        return original(app, *args, **kwargs)

    return register


def _read_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    async def read_file(*args: Any, **kwargs: Any) -> Any:
        text = await original(*args, **kwargs)
        check_batch(text)
        return text

    return read_file


def request_fields(app: Any, scope: Any) -> Container[str] | None:
    """The fields of the request class of a route; none where it has none, None where there is no such route."""
    for route in app.routes:
        matched, _ = route.matches(scope)
        if matched.name == "FULL":
            body = getattr(getattr(route, "body_field", None), "field_info", None)
            return frozenset(getattr(getattr(body, "annotation", None), "model_fields", ()))
    return None
