"""A request's edits as the engine gets them: stored vectors and rows of captures in numbers.

What names something of the caller's own is looked up here, where the store is read and the caller is known: an engine
knows neither. A vector that the engine itself was started with goes there by its name.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from api.errors import ApiError
from api.generate.stored_vectors import StoredVectors
from api.service import check_ref
from schemas import limits
from schemas.bucket.reader import AnyReader
from schemas.codecs import identified
from schemas.edits.forms import no_vector
from schemas.edits.resolve import layers_meant
from schemas.edits.spec import Base64, EditSpec, Source, each_position, parse_edits
from schemas.errors import EditError, LimitError, NotFoundError
from schemas.read.reader import RowsAt
from schemas.sites import ask_site, site_meant
from schemas.wire.engine_info import EngineInfo

__all__ = ["Asked", "ask_edits", "check_armed", "edits_text", "is_exact"]

Asked = list[tuple[EditSpec, dict[str, Any]]]  # each edit as it was checked, and as it was sent
F32 = npt.NDArray[np.float32]
T = TypeVar("T")


def ask_edits(value: object) -> Asked:
    """A request's edits, checked as far as that goes without store and engine; SpecError or LimitError."""
    specs = [] if value is None else parse_edits(value)
    sent = json.loads(value) if isinstance(value, str) else value
    for number, spec in enumerate(specs):
        if spec.from_ is not None and spec.rows is not None:
            raise EditError(f"[{number}].from", spec.from_.capture, "give rows of a capture, or rows, not both")
        if isinstance(spec.vector, Base64) and spec.vector.name is not None:
            raise EditError(f"[{number}].vector.name", spec.vector.name, "only the service names a vector so, after "
                                                                         "a stored one; store yours with PUT "
                                                                         "/v1/vectors/NAME, or leave the name out")
    return list(zip(specs, sent if isinstance(sent, list) else [], strict=True))


def check_armed(asked: Asked, engine: EngineInfo) -> None:
    """EditError where an engine has not armed what edits need, as far as it has told: the rest it refuses itself."""
    armed = {} if engine.edits is None else engine.edits.layers
    for number, (spec, _) in enumerate(asked):
        if spec.op != "stop":
            layers_meant(f"[{number}]", spec, armed, engine.armed.names, engine.n_layers)
        if spec.when is not None and spec.when.probe not in engine.armed.probes:
            raise EditError(f"[{number}].when.probe", spec.when.probe, "no such probe; registered: "
                            f"{', '.join(engine.armed.probes) or 'none'}")


def edits_text(asked: Asked, reader: AnyReader, owner: str, engine: EngineInfo) -> str:
    """The JSON of edits for the engine. It reads files: not for the event loop.

    EditError for what cannot be had, LimitError where it is too much, ApiError 404 for a capture or rows that are not
    there, or not the caller's.
    """
    vectors = StoredVectors(reader.path)
    made: list[dict[str, Any]] = []
    for number, (spec, sent) in enumerate(asked):
        _check_bytes(sum(len(each[name]["base64"]) for each in made for name in ("vector", "rows")
                         if isinstance(each.get(name), Mapping)))
        if isinstance(spec.vector, str):
            made.append(_with_vector(f"[{number}].vector", spec.vector, sent, vectors, owner, engine))
        elif spec.from_ is not None:
            made += _with_rows(f"[{number}]", spec, spec.from_, sent, reader, owner, engine)
        else:
            made.append(sent)
    if len(made) > limits.edits_of_rows_max:
        raise LimitError("edits, rows of a capture counted once for each layer", len(made), limits.edits_of_rows_max,
                         "name fewer layers, or send several requests")
    text = json.dumps(made)
    _check_bytes(len(text))
    return text


def _check_bytes(nbytes: int) -> None:
    if nbytes > limits.edit_json_bytes_max:
        raise LimitError("bytes of the edits", nbytes, limits.edit_json_bytes_max,
                         "name vectors that the engine was started with (--vector NAME=FILE), or fewer positions")


def _with_vector(field: str, name: str, sent: Mapping[str, Any], vectors: StoredVectors, owner: str,
                 engine: EngineInfo) -> dict[str, Any]:
    """An edit with the numbers of its vector, where the caller has stored it; refused where the engine has one too."""
    registered = [] if engine.edits is None else engine.edits.vectors
    if (found := vectors.numbers(owner, name)) is None:
        if engine.edits is not None and name not in registered:
            raise no_vector(field, name, registered)
        return dict(sent)
    if name in registered:
        raise EditError(field, name, "the engine was started with a vector of this name, and you have stored one; "
                                     "which is meant? DELETE /v1/vectors/NAME, and store yours under another")
    return {**sent, "vector": {"base64": _text(found[1]), "name": name}}


def _text(numbers: F32) -> str:
    return base64.b64encode(np.ascontiguousarray(numbers, "<f4").tobytes()).decode()


def _with_rows(at: str, spec: EditSpec, source: Source, sent: Mapping[str, Any], reader: AnyReader, owner: str,
               engine: EngineInfo) -> list[dict[str, Any]]:
    """``set`` with the rows that it names: an edit for each layer, or one where all layers get the same rows."""
    armed = engine.edits
    site, layers = layers_meant(at, spec, {} if armed is None else armed.layers, engine.armed.names, engine.n_layers)
    assert not isinstance(spec.positions, str)  # it was checked
    of = each_position(spec.positions if source.positions is None else source.positions)
    field = f"{at}.from"
    capture = _found(field, source, lambda ref: reader.capture(ref, owner).id)  # a name may be another's tomorrow
    source = source.model_copy(update={"capture": capture})
    of_site, of_layers = _meant(field, source, site, layers, reader, owner)
    values = _rows(field, source, of_site, of_layers, of, reader, owner)
    rest = {name: value for name, value in sent.items() if name not in ("from", "site", "layers")}
    told = {**sent["from"], "capture": source.capture, "site": of_site}
    return [{**rest, "site": site, "layers": [layer] if len(of_layers) > 1 else layers,
             "rows": {"base64": _text(rows)}, "from": {**told, "layer": of_layer}}
            for layer, of_layer, rows in zip(layers, of_layers, values, strict=False)]


def _meant(field: str, source: Source, site: str, layers: Sequence[int], reader: AnyReader, owner: str
           ) -> tuple[str, list[int]]:
    """The site and the layers whose rows are taken: one layer for all, or as many as are edited."""
    if source.site is None:
        return site, list(layers) if source.layer is None else [source.layer]
    key, fixed = ask_site(source.site, f"{field}.site", EditError)
    found = site_meant(key, _found(field, source, lambda ref: reader.names(ref, owner)), source.site, f"{field}.site",
                       EditError)
    if fixed is not None and source.layer not in (None, fixed):
        raise EditError(f"{field}.layer", source.layer, f"is not the layer that {source.site!r} fixes")
    chosen = source.layer if fixed is None else fixed
    return found, list(layers) if chosen is None else [chosen]


def _rows(field: str, source: Source, site: str, layers: Sequence[int], positions: Sequence[int], reader: AnyReader,
          owner: str) -> F32:
    """Rows of a capture, float32 [layers, positions, width]; EditError where they are not what the model had."""

    def read(count: int) -> RowsAt:
        return _found(field, source, lambda ref: reader.rows_at([(ref, each) for each in positions[:count]], site,
                                                                 list(layers), owner))

    first = read(1)  # tells codec and width before more is read
    codec = identified(first.codec)
    if codec.family.projected:
        raise EditError(field, source.capture, f"its rows of {site} are stored as {first.codec}, which keeps other "
                        "numbers than the row's own; capture them with codec raw")
    if not source.decoded and not is_exact(first):
        raise EditError(field, source.capture, f"its rows of {site} are stored as {first.codec}, which is not exact "
                        f"({codec.family.error}); capture them with codec raw, or say \"decoded\": true to set what "
                        "they decode to")
    if (nbytes := len(layers) * len(positions) * first.width * 4) > limits.edit_json_bytes_max * 3 // 4:
        raise LimitError(f"bytes of the rows of edit{field}", nbytes, limits.edit_json_bytes_max * 3 // 4,
                         "name fewer positions or layers")
    values = read(len(positions)).values()
    if not (finite := np.isfinite(values).all(axis=-1)).all():
        layer, number = (int(each) for each in np.argwhere(~finite)[0])
        raise EditError(field, source.capture, f"its row of {site}.{layers[layer]} at position {positions[number]} "
                                               "holds numbers that are not finite")
    return values


def is_exact(rows: RowsAt) -> bool:
    """Whether stored rows are the model's own, bit for bit."""
    return rows.codec == "raw" or (rows.codec == "raw16" and rows.dtype != "float32")


def _found(field: str, source: Source, look: Callable[[str], T]) -> T:
    """The result of ``look`` under a capture's name; ApiError that names the field where there is nothing for the
    caller.

    Another's capture is answered as one that never was.
    """
    try:
        return look(check_ref(source.capture))
    except NotFoundError as error:
        raise ApiError(404, "not_found", f"edit{field} = {source.capture!r}: {error}", f"edit{field}") from None
    except ApiError as error:  # no name of a capture at all
        raise ApiError(error.status, error.code, f"edit{field} = {source.capture!r}: {error.message}", f"edit{field}"
                       ) from None
