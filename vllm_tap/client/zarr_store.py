"""A capture as a store of zarr-python, and so for whatever reads through it: xarray, dask.

>>> xarray.open_zarr(capture.zarr(), group="resid_post")["rows"]                         # doctest: +SKIP
>>> zarr.open_group(capture.zarr(), mode="r")["resid_post/rows"][:, 0]                   # doctest: +SKIP
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from schemas.zarr_view.listing import children_of, keys_of

__all__ = ["CaptureStore", "ZarrSource"]


class ZarrSource(Protocol):
    """A store or service that has captures as Zarr."""

    def zarr_value(self, ref: str, key: str, span: slice) -> bytes | None: ...


class CaptureStore(Store):  # type: ignore[misc]  # zarr's classes are not typed for us
    """The keys of one capture, read-only; None, as zarr has it, for those that there are not.

    A capture that is deleted is an error at every key: no value is ever made up of fill values.
    """

    supports_writes = supports_deletes = False
    supports_partial_writes = False
    supports_listing = True

    def __init__(self, source: ZarrSource, ref: str) -> None:
        super().__init__(read_only=True)
        self.source, self.ref = source, ref
        self._is_open = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CaptureStore) and (other.source, other.ref) == (self.source, self.ref)

    __hash__ = None  # type: ignore[assignment]  # as stores that can be compared have it

    def __repr__(self) -> str:
        return f"CaptureStore({self.ref!r})"

    def with_read_only(self, read_only: bool = False) -> Store:
        """The same; NotImplementedError where it should be written to."""
        if not read_only:
            raise _read_only()
        return self

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """The bytes of a key, or some of them."""
        found = await asyncio.to_thread(self.source.zarr_value, self.ref, key, _span(byte_range))
        return None if found is None else prototype.buffer.from_bytes(found)

    async def get_partial_values(self, prototype: BufferPrototype,
                                 key_ranges: Iterable[tuple[str, ByteRequest | None]]) -> list[Buffer | None]:
        """``get`` of each."""
        return list(await asyncio.gather(*(self.get(key, prototype, span) for key, span in key_ranges)))

    async def exists(self, key: str) -> bool:
        """Whether there is such a key."""
        return await asyncio.to_thread(self.source.zarr_value, self.ref, key, slice(0, 1)) is not None

    async def list(self) -> AsyncIterator[str]:
        """Every key; as many as there are chunks."""
        for key in keys_of(await self._root()):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """The keys that begin so."""
        async for key in self.list():
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """The names directly below a prefix."""
        for name in children_of(await self._root(), prefix):
            yield name

    async def _root(self) -> dict[str, Any]:
        found = await asyncio.to_thread(self.source.zarr_value, self.ref, "zarr.json", slice(None))
        document: dict[str, Any] = json.loads(found or b"")
        return document

    async def set(self, key: str, value: Buffer) -> None:
        """Refused."""
        raise _read_only()

    async def delete(self, key: str) -> None:
        """Refused."""
        raise _read_only()

    async def set_partial_values(self, key_start_values: Iterable[tuple[str, int, bytes]]) -> None:
        """Refused."""
        raise _read_only()


def _span(asked: ByteRequest | None) -> slice:
    if isinstance(asked, RangeByteRequest):
        return slice(asked.start, asked.end)
    if isinstance(asked, OffsetByteRequest):
        return slice(asked.offset, None)
    if isinstance(asked, SuffixByteRequest):
        return slice(-asked.suffix, None) if asked.suffix else slice(0, 0)
    return slice(None)


def _read_only() -> NotImplementedError:
    return NotImplementedError("a capture is only read: copy its arrays elsewhere to change them")
