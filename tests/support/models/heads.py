"""Per-head codecs on a running engine: keys, values and queries against ``raw`` rows of the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.engines.engines import Engine, prompt

F32 = npt.NDArray[np.float32]

HEADS, HEAD = 4, 32
CODECS = {"q": "qk8", "k": "kv8", "v": "kv8", "q_rot": "qk8", "k_rot": "qk8"}


def check_heads(engine: Engine, sites: tuple[str, ...]) -> None:
    """Within 0.51 of each head's scale, and the eight keys that a query attends to most are the same ones."""
    tokens = [t % 500 + 3 for t in prompt(120, seed=120)]
    codec: dict[str, Any] = {site: name for site, name in CODECS.items() if site in sites}
    rows: dict[str, dict[str, F32]] = {}
    for asked in ("raw", codec):
        (one,) = engine.run([tokens], [{"max_tokens": 2, "ignore_eos": True, "detokenize": False}],
                            [{"codec": asked, "sites": list(codec)}])
        assert one.manifest.status == "complete"
        kind = str(asked)
        rows[kind] = {site: engine.reader.slice(one.id, site, [0, 1, 2], 0, 121).values() for site in codec}
    for info in one.manifest.sites:
        assert info.parameters == {"head": HEAD} and info.codec == f"{CODECS[info.site]}:head={HEAD}"
    raw, coded = rows["raw"], rows[str(codec)]
    for site in codec:
        x, y = (part[site].reshape(*part[site].shape[:2], -1, HEAD) for part in (raw, coded))
        scale = np.abs(x).max(-1, keepdims=True) / 127
        assert (np.abs(x - y) <= 0.515 * scale).all(), site
    q, k = ("q_rot", "k_rot") if "q_rot" in codec else ("q", "k")
    same, seen = 0, 0
    for layer in range(3):
        top, true = (attended(part[q][layer], part[k][layer]) for part in (coded, raw))
        same, seen = same + int((top & true).sum()), seen + int(true.sum())
    assert same / seen >= 0.99, same / seen


def attended(q: F32, k: F32) -> npt.NDArray[np.bool_]:
    """Of every query that sees more than eight keys, the eight of largest score."""
    queries = q.reshape(len(q), HEADS, HEAD)
    keys = k.reshape(len(k), -1, HEAD)
    keys = np.repeat(keys, HEADS // keys.shape[1], axis=1)
    scores = np.einsum("thd,shd->hts", queries, keys)
    scores[:, ~np.tri(len(q), dtype=bool)] = -np.inf
    return (scores >= np.sort(scores, -1)[..., -8:-7])[:, 8:]
