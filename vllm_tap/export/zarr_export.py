"""A capture as a Zarr v3 hierarchy in a folder or a bucket: the keys of its view, copied one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from schemas.bucket.reader import Source, open_reader
from schemas.errors import NotFoundError, TapError
from schemas.manifest import Manifest
from schemas.zarr_view.view import CaptureView
from vllm_tap.client.convert import need
from vllm_tap.export.array_files import replacing_folder

__all__ = ["export_zarr"]

_ROOT: Final = "zarr.json"  # written last: what has none is no hierarchy
_BEGUN: Final = "vllm-tap-export-begun"  # an object beside a hierarchy that is not whole


def export_zarr(store: Source, ref: str, out: str | None, choose: Callable[[Manifest], Mapping[str, Sequence[int]]],
                force: bool) -> list[str]:
    """Writes the capture and returns where it lies; ``out`` is a folder, or a URL of a bucket (s3://, gs://, az://).

    NotFinalError where the capture is not final; TapError where ``out`` has something and not ``force``, and where it
    has something else than a hierarchy.
    """
    with open_reader(store) as reader:
        manifest = reader.manifest(ref)
        view = CaptureView(reader, manifest.id, chosen=choose(manifest))
        if not view.layers:
            raise NotFoundError(f"capture {manifest.id} is {manifest.status} and holds no rows to export")
        if out is not None and "://" in out:
            _to_bucket(out, view, force)
            return [out]
        target = Path(out or f"{manifest.id}.zarr")
        try:
            _to_folder(target.resolve() if target.is_symlink() else target, view, force)
        except OSError as error:
            raise TapError(f"--out = {str(target)!r}: {error}") from None
        return [str(target)]


def _to_folder(target: Path, view: CaptureView, force: bool) -> None:
    """The hierarchy, under its name only when it is whole."""
    if target.exists() and not target.is_dir():
        raise TapError(f"--out = {str(target)!r}: zarr writes a folder, and this is a file")
    if target.exists() and not force:
        raise TapError(f"--out = {str(target)!r}: exists already; name another or add --force")
    if target.exists() and any(target.iterdir()) and not (target / _ROOT).is_file():
        raise TapError(f"--out = {str(target)!r}: is a folder of something else than Zarr; name another")
    with replacing_folder(target) as folder:
        for key in view.every_key():
            path = folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_bytes(view, key))


def _to_bucket(url: str, view: CaptureView, force: bool) -> None:
    """One object a key, by obstore; credentials are those of the environment."""
    obstore, stores, exceptions = (need(name, "an export to a URL")
                                   for name in ("obstore", "obstore.store", "obstore.exceptions"))
    try:
        bucket = stores.from_url(url)
        there = [entry["path"] for page in obstore.list(bucket) for entry in page]
        if there and not {_ROOT, _BEGUN} & set(there):
            raise TapError(f"--out = {url!r}: has objects of something else than Zarr; name another")
        if there and not force:
            was = "an export that was interrupted" if _BEGUN in there else f"{len(there)} objects"
            raise TapError(f"--out = {url!r}: has {was} already; name another or add --force")
        obstore.put(bucket, _BEGUN, b"")
        if there:
            if _ROOT in there:
                obstore.delete(bucket, [_ROOT])  # from now on there is no hierarchy until the new one is whole
            obstore.delete(bucket, [path for path in there if path not in (_ROOT, _BEGUN)])
        for key in view.every_key():
            obstore.put(bucket, key, _bytes(view, key))
        obstore.delete(bucket, [_BEGUN])
    except (OSError, ValueError, exceptions.BaseError) as error:
        raise TapError(f"--out = {url!r}: {str(error).partition('Debug source:')[0].strip()}") from None


def _bytes(view: CaptureView, key: str) -> bytes:
    value = view.value(key)
    assert value is not None, key
    return value.read()
