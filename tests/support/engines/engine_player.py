"""Plays the engine's side of the protocol over a real socket, with rows that a test can make again by itself.

The numbers of a row follow from (sample, site, layer, position) alone, so whoever reads them back can tell exactly
what must be there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from schemas import codecs
from schemas.probes import Probe
from schemas.sites import SITES, is_probe
from schemas.spec import Armed, CaptureSpec, Resolved, intervals, resolve
from schemas.wire.engine_info import Editable, EngineInfo, Ring
from schemas.wire.messages import Frame, Ping, TapState, encode
from schemas.wire.records import Dropped, Finish, Open, Record
from schemas.wire.row_table import FLAG_DRAFT, RowTable
from tests.support.store_helpers import Sender, frame_of

F32 = npt.NDArray[np.float32]

LAYERS = 4
WIDTH = 96  # not a multiple of int8b64's block
TONE = Probe(site="resid_post", layer=2, names=["glad", "sad"], activation="none", fingerprint="p1")
ARMED = Armed(sites={"resid_post": [0, 1, 2, 3], "attn_out": [0, 1, 2, 3]}, n_layers=LAYERS, probes={"tone": TONE})

EDITS = Editable(layers={"resid_post": [0, 1, 2, 3], "attn_out": [2]}, depth=2, vectors=["tone"], rows=256)


def engine_info(dtype: str, armed: Armed = ARMED, name: str = "", model: str = "played") -> EngineInfo:
    """What the played engine says of itself."""
    return EngineInfo(model=model, name=name or UNSET, model_dtype=dtype, fingerprint="f1", revision="",
                      tokenizer="bytes", n_layers=LAYERS, armed=armed, max_model_len=4096, vllm_version="0.32.0",
                      tap_version="0", widths={**dict.fromkeys({**ARMED.sites, **armed.sites}, WIDTH), "probe.tone": 2},
                      runner="played", ring=Ring(1 << 20, "played", "drop"),
                      edits=EDITS if "resid_post" in armed.sites else None)


def rows(sample: int, site: str, layer: int, positions: list[int], dtype: str) -> F32:
    """The true rows ``[n, WIDTH]``, rounded to the model's dtype; a probe's are two numbers that are not."""
    seed = 1000 if is_probe(site) else list(SITES).index(site)
    width, dtype = (2, "float32") if is_probe(site) else (WIDTH, dtype)
    x = np.stack([np.random.default_rng([sample, seed, layer, p]).standard_normal(width).astype(np.float32) * 3
                  for p in positions]) if positions else np.zeros((0, width), np.float32)
    return from_bits(to_bits(x)) if dtype == "bfloat16" else x.astype(dtype).astype(np.float32)


def to_bits(x: F32) -> npt.NDArray[np.uint16]:
    """bfloat16 bits of finite numbers, nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bits(bits: npt.NDArray[np.uint16]) -> F32:
    """The inverse, exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def encode_rows(codec: str, x: F32, dtype: str) -> dict[str, npt.NDArray[np.generic]]:
    """Stored pieces of rows ``[..., WIDTH]``: those of the first codecs written down from their description."""
    if codec in ("raw", "raw16"):
        kept = "bfloat16" if codec == "raw16" and dtype == "float32" else dtype
        return {"x": to_bits(x) if kept == "bfloat16" else x.astype(kept)}
    if codec != "int8b64":
        import torch

        from engine_side.codecs import encode as encode_codec

        pieces = encode_codec(codec, torch.from_numpy(np.ascontiguousarray(x)))
        return {stream.name: pieces[stream.name].numpy() for stream in codecs.streams(codec, x.shape[-1], dtype)}
    kept = np.argsort(-np.abs(x), axis=-1, kind="stable")[..., :8]
    outliers = np.take_along_axis(x, kept, -1)
    rest = x.copy()
    np.put_along_axis(rest, kept, 0, -1)
    padded = np.zeros((*x.shape[:-1], 128), np.float32)
    padded[..., :WIDTH] = rest
    blocks = padded.reshape(*x.shape[:-1], 2, 64)
    scale = to_bits(np.abs(blocks).max(-1) / 127)
    step = from_bits(scale)[..., None]
    q = np.clip(np.rint(np.divide(blocks, step, out=np.zeros_like(blocks), where=step > 0)), -127, 127)
    return {"q": q.reshape(padded.shape)[..., :WIDTH].astype(np.int8), "scale": scale,
            "outlier_index": kept.astype(np.uint16), "outlier_value": to_bits(outliers)}


def decoded(codec: str, sample: int, site: str, layer: int, positions: list[int], dtype: str) -> F32:
    """What a reader must get, bit for bit."""
    return codecs.decode(codec, encode_rows(codec, rows(sample, site, layer, positions, dtype), dtype), WIDTH, dtype)


class EnginePlayer:
    """One engine stream; every method returns when the writer holds what was sent durably."""

    def __init__(self, endpoint: str, dtype: str = "bfloat16", ping: bool = True, armed: Armed = ARMED,
                 name: str = "", model: str = "played") -> None:
        self._info = engine_info(dtype, armed, name, model)
        self._sender = Sender(endpoint, engine=self._info)
        self._sender.hello()
        self.tap: TapState | None = None  # what it says of itself
        self._lock = threading.Lock()
        self._closed = threading.Event()
        if ping:
            threading.Thread(target=self._ping, daemon=True).start()

    @property
    def armed(self) -> Armed:
        """What it says that it can capture."""
        return self._info.armed

    def _ping(self) -> None:
        while not self._closed.wait(0.5):
            with self._lock:
                if not self._closed.is_set():
                    self._sender.socket.send(encode(Ping(self.tap)))
                    while self._sender.receive(0) is not None:
                        pass

    def _send(self, message: Record | Frame, *parts: bytes) -> None:
        self._sender.send(message, *parts)
        self._sender.wait()

    def record(self, make: type[Record], **fields: object) -> None:
        """A control record."""
        with self._lock:
            self._send(make(seq=self._sender.next(), **fields))

    def open(self, capture: str, spec: CaptureSpec, tokens: list[int], cached: int = 0, adapter: str = ""
             ) -> Resolved:
        """Begins a capture."""
        resolved = resolve(spec, self._info.armed)
        self.record(Open, capture=capture, request=f"req-{capture}", asked=spec.to_json(), resolved=resolved,
                    prompt_len=len(tokens), prompt_token_ids=np.array(tokens, "<u4").tobytes(), cached=cached,
                    created_ms=time.time_ns() // 1_000_000, adapter=adapter)
        return resolved

    def send_rows(self, capture: str, sample: int, resolved: Resolved, prompt_len: int, tokens: list[int],
                  positions: list[int], draft: bool = False, nan: Collection[int] = ()) -> None:
        """Rows at those of ``positions`` that the spec selects; ``tokens`` are prompt and output together.

        ``draft``: the rows are guesses; ``nan``: positions whose scores are no numbers.
        """
        ranges = intervals(resolved.positions, prompt_len)
        chosen = [p for p in positions if any(start <= p < stop for start, stop in ranges)]
        for site, layers in resolved.layers.items():
            if not chosen or not layers:
                continue
            codec = resolved.codec[site]
            dtype = self._info.dtype_of(site)
            x = np.stack([rows(sample, site, layer, chosen, dtype) for layer in layers])
            if is_probe(site):
                x[:, np.isin(chosen, list(nan))] = np.nan
            pieces = {name: array.tobytes() for name, array in encode_rows(codec, x, dtype).items()}
            table = RowTable(*(np.array(column, np.uint32) for column in (
                [0] * len(chosen), chosen, [tokens[p] for p in chosen],
                [int(p >= prompt_len) | FLAG_DRAFT * draft for p in chosen])))
            with self._lock:
                frame, parts = frame_of(self._sender.next(), site, codec, dtype, x.shape[-1], layers, [capture],
                                        [len(chosen)], table, pieces, self._info.fingerprint)
                self._send(frame, *parts)
                assert frame.seq not in self._sender.refused, self._sender.refused

    def drop(self, capture: str, site: str, layers: list[int], start: int, stop: int) -> None:
        """Says that rows were not kept."""
        self.record(Dropped, capture=capture, site=site, layers=layers, start=start, stop=stop)

    def finish(self, capture: str, reason: str, output: list[int], end: int) -> None:
        """Ends a capture."""
        self.record(Finish, capture=capture, reason=reason, stop_reason=None,
                    output_token_ids=np.array(output, "<u4").tobytes(), end=end)

    def close(self) -> None:
        """Goes silent, as a killed engine does."""
        self._closed.set()
        with self._lock:
            self._sender.close()
