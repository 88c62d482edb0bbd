"""One capture as its user sees it, the same over HTTP and from a store on disk.

>>> capture["resid_post", 12]                            # float32 [rows, width].               # doctest: +SKIP
>>> capture["blocks.12.hook_resid_post"]                 # the same.                            # doctest: +SKIP
>>> capture.slice("resid_post", [0, 12], 5, 9).values    # float32 [layers, rows, width].       # doctest: +SKIP
>>> capture.to_xarray()["resid_post"].sel(layer=12)      # by name: token, layer, hidden.       # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from schemas import limits
from schemas.attended import Attention, AttentionAsked
from schemas.errors import ArgumentError, NotFoundError
from schemas.manifest import Manifest, Missing
from schemas.sites import BY_MODEL, PROBE, ask_site, names_of, site_meant
from vllm_tap.errors import MissingRows

if TYPE_CHECKING:
    import datasets
    import torch
    import xarray

    from schemas.attention import AttentionRule
    from vllm_tap.client.zarr_store import CaptureStore

__all__ = ["Capture", "CaptureSource", "Rows"]

F32 = npt.NDArray[np.float32]
U32 = npt.NDArray[np.uint32]
Layers = int | np.integer[Any] | Sequence[int] | npt.NDArray[np.integer[Any]] | None
Key = str | tuple[str, Layers]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows at positions ``[start, stop)`` of some layers of a site.

    ``values`` is float32 ``[layers, rows, width]``; ``positions`` and ``token_ids`` are uint32 ``[rows]``. Positions
    that are not there for every layer are in ``missing``; ``clipped`` says that the range reached past the end.
    """

    capture: str
    site: str
    layers: list[int]
    start: int
    stop: int
    positions: U32
    token_ids: U32
    values: F32
    missing: list[Missing]
    clipped: bool

    def to_numpy(self) -> F32:
        """``values``: float32 ``[layers, rows, width]``."""
        return self.values

    def to_torch(self) -> torch.Tensor:
        """The same as a tensor, float32 ``[layers, rows, width]``, over the same memory."""
        from vllm_tap.client.convert import tensor

        return tensor(self.values)

    def to_xarray(self) -> xarray.DataArray:
        """Dimensions ``token, layer, hidden``; coordinates ``layer``, and the tokens' ``position`` and ``token_id``."""
        from vllm_tap.client.convert import data_array

        return data_array(self)


class CaptureSource(Protocol):
    """A store or service that holds captures. ``wait_s``: seconds that a capture may take to become final."""

    def manifest(self, ref: str, wait_s: float | None = None) -> Manifest: ...

    def final(self, ref: str, wait_s: float) -> Manifest: ...

    def rows(self, ref: str, site: str, layers: Sequence[int], start: int, stop: int | None,
             wait_s: float | None, rejected: bool = False) -> Rows: ...

    def zarr_value(self, ref: str, key: str, span: slice) -> bytes | None: ...

    def attention(self, ref: str, asked: AttentionAsked, wait_s: float) -> Attention: ...


class Capture:
    """A capture by any of its names. Reads lazily: each method reads what it returns."""

    def __init__(self, source: CaptureSource, ref: str, wait_s: float = 30.0) -> None:
        self.id, self.wait_s, self._source = ref, wait_s, source

    def __repr__(self) -> str:
        return f"Capture({self.id!r})"

    def manifest(self) -> Manifest:
        """Return the account of rows; waits until the capture is final, at most ``wait_s`` seconds."""
        return self._source.manifest(self.id, self.wait_s)

    def wait(self, timeout_s: float | None = None) -> Manifest:
        """Wait for the final manifest; raises NotComplete after ``timeout_s`` (default ``wait_s``)."""
        return self._source.final(self.id, self.wait_s if timeout_s is None else timeout_s)

    @property
    def status(self) -> str:
        """pending, running, complete, empty, incomplete or failed, as of now."""
        return self._source.manifest(self.id).status

    @property
    def sites(self) -> dict[str, list[int]]:
        """The layers captured, by site."""
        return sites_of(self.manifest())

    def __getitem__(self, key: Key) -> F32:
        """All rows of a site and layer, float32 ``[rows, width]`` (with a list of layers ``[layers, rows, width]``).

        Waits until the capture is final.

        Raises:
            MissingRows: some of these rows are missing; it names their ranges and reasons.
            NotComplete: the capture is not final after ``wait_s`` seconds.
            NotFoundError: the site or layer was not captured.
        """
        name, layer = key if isinstance(key, tuple) else (key, None)
        return drop_layer_axis(self.slice(name, layer).values, layer)

    def probe(self, name: str) -> F32:
        """All scores of a registered probe, float32 ``[rows, k]``; raises what ``capture[site, layer]`` raises.

        ``capture.slice(f"probe.{name}", …)`` has their positions; the manifest the names of the k scores.
        """
        return self[f"{PROBE}{name}"]

    def slice(self, site: str, layer: Layers = None, start: int = 0, stop: int | None = None,
              allow_missing: bool = False) -> Rows:
        """Rows at positions ``[start, stop)``; ``layer`` may be left out where the site's name fixes it.

        With ``allow_missing`` it does not wait and does not raise MissingRows: it takes the rows that are there.
        """
        site, layers = self._place(site, layer)
        wait_s = None if allow_missing else self.wait_s
        return require_whole(self._source.rows(self.id, site, layers, start, stop, wait_s), allow_missing)

    def rejected(self, site: str, layer: Layers = None, start: int = 0, stop: int | None = None) -> Rows:
        """Rows of drafts (speculative decoding) that were not accepted; ``token_ids`` are what was guessed.

        By position and, where one was guessed at more than once, oldest first; they may reach past the end.
        """
        site, layers = self._place(site, layer)
        return self._source.rows(self.id, site, layers, start, stop, self.wait_s, rejected=True)

    def attention(self, layer: int, rule: AttentionRule | None = None, top: int = 8, start: int = 0,
                  stop: int | None = None, allow_missing: bool = False, check: bool = False,
                  heads: Sequence[int] | None = None) -> Attention:
        """The ``top`` keys of every head and query of a layer, with their weights, and the entropy in nats.

        The queries are at positions ``[start, stop)`` and of ``heads`` (default: all). Attention is computed from the
        capture's ``q_rot`` and ``k_rot``, causally. Over HTTP the service computes it, and only the results travel.

        ``rule`` says how the layer weighs keys. It may be left out where the engine told it, as engines do on one
        device and on several. The call waits until the capture is final. With ``allow_missing`` it does not wait, and
        leaves out queries that lack a row; ``unattended`` names them. ``check`` reads the layer's ``v`` and ``z`` too.
        ``z_error`` then says how far the rule is from what the kernel did.

        Raises:
            MissingRows: a query, or a key that one of them sees, is not there; it names their ranges and reasons.
            NotComplete: the capture is not final after ``wait_s`` seconds.
            NotFoundError: ``q_rot`` or ``k_rot`` of the layer (to check, ``v`` or ``z``) was not captured.
            ArgumentError: no ``rule`` where the engine told none, or one that is not the layer's. Also a layer that no
                rule fits (attention sinks, ALiBi), or rows that are no columns of heads. Over HTTP BadRequest.
            LimitError: more than ``schemas.limits`` allows. Over HTTP BadRequest.
        """
        check_range(start, stop)
        return self._source.attention(self.id, AttentionAsked(
            layer=layer, rule=rule, top=top, spans=[(start, stop)], heads=heads, allow_missing=allow_missing,
            check=check), self.wait_s)

    # ── as other libraries have it ──────────────────────────────────────────────────────────────────────────────

    def to_numpy(self, site: str | None = None, layer: Layers = None) -> dict[str, F32]:
        """``{"resid_post.12": float32 [rows, width], …}`` of everything captured, or of one site, or of some layers.

        Raises what ``capture[site, layer]`` raises.
        """
        return {f"{rows.site}.{number}": values for rows in self._all(site, layer)
                for number, values in zip(rows.layers, rows.values, strict=True)}

    def to_torch(self, site: str | None = None, layer: Layers = None) -> dict[str, torch.Tensor]:
        """``to_numpy`` as tensors, under TransformerLens's names where there are such, as in an activation cache."""
        from vllm_tap.client.convert import tensors

        return tensors(self._all(site, layer), names_of(self.manifest().engine))

    def to_xarray(self, site: str | None = None, layer: Layers = None) -> xarray.Dataset:
        """One variable a site, dimensions ``token, layer, hidden`` (another width: ``{site}_width``, other layers:
        ``{site}_layer``); coordinates ``position`` and ``token_id`` of the tokens. Needs xarray.
        """
        from vllm_tap.client.convert import dataset_of_sites

        return dataset_of_sites(self._all(site, layer))

    def to_dataset(self, site: str | None = None, layer: Layers = None) -> datasets.Dataset:
        """A Hugging Face dataset, a row a token: ``capture``, ``position``, ``token_id``, and a list of float32 for
        each ``site.layer``. Needs datasets.
        """
        from vllm_tap.client.convert import hugging_face

        return hugging_face(self._all(site, layer))

    def zarr(self, wait_s: float | None = None) -> CaptureStore:
        """The capture as a read-only store of zarr-python, whose chunks are read when they are asked for: open it with
        ``xarray.open_zarr(capture.zarr(), group="resid_post")``, or with zarr itself. Needs zarr.

        Waits until the capture is final; NotComplete where that takes longer (default: ``wait_s``).
        """
        from vllm_tap.client.convert import need

        need("zarr", "zarr()")
        from vllm_tap.client.zarr_store import CaptureStore

        return CaptureStore(self._source, self.wait(wait_s).id)

    def _all(self, site: str | None, layer: Layers) -> list[Rows]:
        if site is not None:
            named, layers = site_and_layers(site, layer)
            named = site_on_model(named, site, self.manifest)
            return [self.slice(named, self.sites.get(named) if layers is None else layers)]
        if layer is not None:
            chosen = layers_of(layer)
            return [self.slice(name, chosen) for name in self.sites]
        return [self.slice(name, layers) for name, layers in self.sites.items() if layers]

    def _place(self, name: str, layer: Layers) -> tuple[str, list[int]]:
        site, layers = site_and_layers(name, layer)
        site = site_on_model(site, name, self.manifest)
        return site, only_layer(site, self.manifest()) if layers is None else layers


def sites_of(manifest: Manifest) -> dict[str, list[int]]:
    """The layers captured, by site."""
    layers: dict[str, list[int]] = manifest.resolved.get("layers", {})
    return layers


def layers_of(layer: Layers) -> list[int] | None:
    """The layers named: a number or several, as Python, NumPy or torch have them; None where none was."""
    if layer is None:
        return None
    with suppress(TypeError, ValueError):  # lists of different lengths, a tensor on a device
        found = np.asarray(layer)
        if found.ndim < 2 and (not found.size or found.dtype.kind in "iu") and not (found < 0).any():
            return [int(number) for number in np.atleast_1d(found)]
    raise ArgumentError("layer", layer, "valid: a layer's number, or several in a list or an array, counted from 0")


def check_range(start: int, stop: int | None) -> None:
    """ArgumentError where an end of ``[start, stop)`` is negative, as the service has it: there is no counting from
    the end.
    """
    for name, position in (("start", start), ("stop", stop)):
        if position is not None and position < 0:
            raise ArgumentError(name, position, f"valid: a position from 0 to {limits.position_max}")


def drop_layer_axis(values: F32, layer: Layers) -> F32:
    """``values`` ``[layers, …]`` for a caller who named several layers; those of the only layer for one who named one.
    """
    return values if np.ndim(layer) else values[0]  # type: ignore[arg-type]  # None has no dimension


def site_and_layers(name: str, layer: Layers) -> tuple[str, list[int] | None]:
    """The site and layers that were asked for; None where no layer was named. SpecError where two were that differ. The
    site may be one that the model decides (``site_on_model``).
    """
    site, fixed = ask_site(name, "site", ArgumentError)
    asked = layers_of(layer)
    if fixed is None:
        return site, asked
    if asked not in (None, [fixed]):
        raise ArgumentError("layer", layer, f"is not the layer that {name!r} fixes")
    return site, [fixed]


def site_on_model(site: str, name: str, manifest: Callable[[], Manifest]) -> str:
    """The site that ``name`` stands for on a capture's model, from what ``site_and_layers`` found; the manifest is read
    where the model decides.
    """
    return site_meant(site, names_of(manifest().engine) if site in BY_MODEL else {}, name, "site", ArgumentError)


def only_layer(site: str, manifest: Manifest) -> list[int]:
    """The layer of a site that was captured in one layer alone."""
    sites = sites_of(manifest)
    if site not in sites:
        raise NotFoundError(f"capture {manifest.id} has no site {site}; it has: {', '.join(sites) or 'none'}")
    if len(sites[site]) != 1:
        raise ArgumentError("layer", None, f"name a layer of {site}; captured: {sites[site]}")
    return sites[site]


def require_whole(rows: Rows, allow_missing: bool) -> Rows:
    """The rows; MissingRows where some are missing that must not be."""
    if rows.missing and not allow_missing:
        raise MissingRows(rows.capture, f"{rows.site}, layer {', '.join(map(str, rows.layers))}", rows.missing)
    return rows


def read_missing(value: list[dict[str, Any]]) -> list[Missing]:
    """Ranges as they travel in JSON."""
    return [Missing(int(gap["start"]), int(gap["stop"]), str(gap["reason"])) for gap in value]
