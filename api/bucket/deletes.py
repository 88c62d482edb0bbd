"""Deletion of captures in buckets. What deletes there belongs to the package of the commands, which this
one knows by an entry point alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any, Final

from schemas.errors import OutrunError, StartError

__all__ = ["Deletes"]

log = logging.getLogger("vllm_tap.api")

_GROUP: Final = "vllm_tap.bucket"
_TRIES: Final = 5  # against pushes and other services, which write the same head


class Deletes:
    """The function behind ``vllm-tap rm --store URL``, with the database of the catalog, if there is one."""

    def __init__(self, catalog: str) -> None:
        found = entry_points(group=_GROUP, name="delete")
        if not found:
            raise StartError("deletes: nothing here deletes in buckets; install vllm-tap whole, with vllm-tap[buckets]")
        self._delete: Callable[[str, Sequence[str], str | None], Any] = next(iter(found)).load()
        self._catalog = catalog or None

    def delete(self, url: str, captures: Sequence[str]) -> None:
        """Hide captures in the bucket at ``url`` from every reader; its store's folder deletes them with its next push.
        ConflictError: one is on hold. OutrunError: others wrote the head each time. BucketError, CatalogError.
        """
        for again in range(_TRIES):
            try:
                self._delete(url, captures, self._catalog)
                break
            except OutrunError:
                if again == _TRIES - 1:
                    raise
                time.sleep(0.2 * (again + 1))
        log.info("%s: deleted %s", url, ", ".join(captures))
