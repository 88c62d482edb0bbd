"""Two ranks of one model: each sends its share of every row, and what is read are whole rows, as of one rank."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_side.transport.ring_files import PREFIX, directory
from engine_side.transport.shared_memory import EXTRA
from schemas.read.reader import StoreReader
from tests.engine.conftest import Store
from tests.engine.ranks.collectives import by_step, count, counted
from tests.engine.test_architectures import SITES as SITES_OF
from tests.support.engines.engines import (
    ALL_ROWS,
    DTYPE,
    ON_GPU,
    SHARED,
    SITES,
    Captured,
    Engine,
    in_this_process,
    row_errors,
    start,
)
from tests.support.models.blocks_reference import BlocksReference
from tests.support.models.families import family_model
from tests.support.models.features import GREEDY, tokens
from tests.support.models.reference import Reference
from tests.support.models.unlisted import UNLISTED

pytestmark = [pytest.mark.soak,
              pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="one GPU cannot hold two ranks")]


def two_ranks(family: str, reader: StoreReader, reference_of: Callable[[str], Reference]) -> Engine:
    """An engine of a family of the table, or of one whose sites are found by structure, by all ranks at once."""
    if family not in UNLISTED:
        return start(reader, reference_of(family), family, here=False, tensor_parallel_size=2)
    from vllm import LLM

    folder = family_model(family, DTYPE)
    with in_this_process(False):
        llm = LLM(str(folder), dtype=DTYPE, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8, seed=0,
                  block_size=32, tensor_parallel_size=2, **SHARED)
    return Engine(llm, reader, BlocksReference(folder, UNLISTED[family]))


@pytest.mark.parametrize(("family", "rows"), [("qwen3", ALL_ROWS), ("granite", 3 * len(SITES))])
def test_rows_of_two_ranks_arrive_once(
    family: str, rows: int, reader: StoreReader, store: Store, reference_of: Callable[[str], Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def engine_streams() -> int:
        with sqlite3.connect(f"file:{store.path}/catalog.sqlite?mode=ro", uri=True) as db:
            return int(db.execute("SELECT count(*) FROM streams WHERE role = 'engine'").fetchone()[0])

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    before = engine_streams()
    engine = two_ranks(family, reader, reference_of)
    try:
        captured = engine.run([tokens(length, seed=length) for length in (5, 90, 31)],
                              [{"max_tokens": 7, **GREEDY}] * 3, [{"codec": "raw"}] * 3)
        for one in captured:
            assert one.manifest.status == "complete"
            assert engine.check(one) == rows * (one.prompt_len + 6)
        assert engine_streams() - before == 2
    finally:
        engine.close()


BEFORE_SUMS = ("embed", "resid_pre.0", "q.0", "k.0", "v.0")  # no all-reduce has been made yet
SPECS = [{"codec": "raw"}, {"codec": "raw"}, {"codec": "raw", "sites": ["resid_post"], "layers": [1]},
         {"codec": "raw", "sites": ["resid_mid"], "layers": [2]}, {"codec": "int8b64", "sites": ["z", "resid_post"]}]


def of_ranks(family: str, ranks: int, reader: StoreReader) -> Engine:
    from vllm import LLM

    folder = family_model(family, DTYPE)
    with in_this_process(ranks == 1 and not ON_GPU):
        llm = LLM(str(folder), dtype=DTYPE, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8, seed=0,
                  block_size=32, max_num_batched_tokens=48, tensor_parallel_size=ranks, **SHARED)
    return Engine(llm, reader, Reference(folder))


def run(engine: Engine) -> list[Captured]:
    found: list[Captured] = engine.run([tokens(length, seed=length) for length in (5, 90, 31, 12, 64)],
                                       [{"max_tokens": 7, **GREEDY} for _ in SPECS], SPECS)
    return found


def rings(store: Store) -> dict[Path, int]:
    """Bytes of the rings that the writer reads."""
    mapped = Path(f"/proc/{store.writer.pid}/maps").read_text()
    return {path: path.stat().st_size - EXTRA for path in directory().glob(f"{PREFIX}*") if str(path) in mapped}


@pytest.mark.parametrize("family", ["qwen3, two K/V heads", "qwen3, one K/V head"])
def test_every_site_of_two_ranks_is_that_of_one(
    family: str, reader: StoreReader, store: Store, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions go to the workers
    monkeypatch.setenv("VLLM_TAP_ARM", ",".join(SITES_OF["qwen3"]))
    had = rings(store)
    engine = of_ranks(family, 1, reader)
    try:
        (single,) = sent_in_a_step(engine, store)
        alone, (ring,) = run(engine), [size for path, size in rings(store).items() if path not in had]
    finally:
        engine.close()
    had = rings(store)
    engine = of_ranks(family, 2, reader)
    try:
        pair = sent_in_a_step(engine, store)
        found, own = run(engine), [size for path, size in rings(store).items() if path not in had]
        for codec, site in (("topk:k=8", "q"), ("topk:k=8", "z")):
            with pytest.raises(ValueError, match=f"ranks share out the columns of {site}"):
                engine.run([tokens(5, seed=1)], [{"max_tokens": 1, **GREEDY}], [{"codec": codec, "sites": [site]}])
    finally:
        engine.close()
    assert len(own) == 2 and (ON_GPU or own == [ring // 2] * 2)  # on a GPU: room for two steps of what is armed
    for one, two in zip(alone, found, strict=True):
        assert two.manifest.status == "complete" and (ON_GPU or one.tokens == two.tokens)
        assert [(row.site, row.layer, row.captured) for row in one.manifest.rows] == [
            (row.site, row.layer, row.captured) for row in two.manifest.rows]
        assert all(not row.missing for row in two.manifest.rows)
        assert one.manifest.engine["fingerprint"] == two.manifest.engine["fingerprint"]
    for two in found[:-1]:
        held_against(engine, two)
    if not ON_GPU:  # whose products of matrices of another size are others
        same_bits(reader, alone[1], found[1])
    held_in_halves(store, found[0], alone[0])
    if family == "qwen3, two K/V heads":  # of one head each layer's keys and values are of one rank
        assert pair == [Sent(single.frames, single.payload // 2)] * 2


def held_against(engine: Engine, captured: Captured) -> None:
    """Every row of a capture against Hugging Face: sums of halves are off by more than whole ones."""
    wanted = engine.reference.rows(captured.tokens)
    for row in captured.manifest.rows:
        rows = engine.reader.slice(captured.id, row.site, [row.layer], 0, len(captured.tokens))
        if ON_GPU:
            assert row_errors(rows.values()[0], wanted[row.site, row.layer][rows.positions]).max() <= 1
            continue
        off = np.abs(rows.values()[0] - wanted[row.site, row.layer][rows.positions])
        scale = np.abs(wanted[row.site, row.layer]).max()
        assert off.max() <= 3e-5 * max(1, scale), f"{row.site}.{row.layer}: {off.max():.1e}"


def same_bits(reader: StoreReader, one: Captured, two: Captured) -> None:
    for row in one.manifest.rows:
        if not {row.site, f"{row.site}.{row.layer}"}.isdisjoint(BEFORE_SUMS):
            bits = [reader.slice(each.id, row.site, [row.layer], 0, len(each.tokens)).values() for each in (one, two)]
            assert np.array_equal(*bits), f"{row.site}.{row.layer}"


def held_in_halves(store: Store, two: Captured, one: Captured) -> None:
    """Bytes of each rank, of what every layer has, are half of one rank's."""
    with sqlite3.connect(f"file:{store.path}/catalog.sqlite?mode=ro", uri=True) as db:
        sums = {each.id: db.execute("SELECT part, sum(bytes) FROM extents WHERE capture = ? AND site NOT IN "
                                    "('embed', 'final_norm') GROUP BY part ORDER BY part", (each.id,)).fetchall()
                for each in (one, two)}
    (_, nbytes), = sums[one.id]
    assert sums[two.id] == [(0, nbytes // 2), (1, nbytes // 2)]


@dataclass(frozen=True)
class Sent:
    """What a rank has sent of a step: frames, and the encoded bytes in them."""

    frames: int
    payload: int


def sent_in_a_step(engine: Engine, store: Store) -> list[Sent]:
    """By rank, of the sites that every layer has, with a prompt of one step: a frame a site. In its ring are those
    bytes, and beside each site's a token id and a position for every token.
    """
    sites, count = [site for site in SITES_OF["qwen3"] if site not in ("embed", "final_norm")], 48
    before = engine.llm.collective_rpc(taken)
    (one,) = engine.run([tokens(count, seed=9)], [{"max_tokens": 1, **GREEDY}], [{"codec": "raw", "sites": sites}])
    more = [[now - then for now, then in zip(*each, strict=True)]
            for each in zip(engine.llm.collective_rpc(taken), before, strict=True)]
    with sqlite3.connect(f"file:{store.path}/catalog.sqlite?mode=ro", uri=True) as db:
        frames = dict(db.execute("SELECT part, count(DISTINCT seq) FROM extents WHERE capture = ? GROUP BY part",
                                 (one.id,)).fetchall())
    assert [ring for _, ring in more] == [payload + len(sites) * count * 12 for payload, _ in more]
    return [Sent(frames[rank], payload) for rank, (payload, _) in enumerate(more)]


def taken(_: Any) -> tuple[int, int]:
    """Of a rank's worker: bytes of rows that it encoded, and of its ring that were ever in use."""
    from engine_side import worker

    assert worker.CURRENT is not None
    recorder = worker.CURRENT.recorder
    return recorder.counters.bytes, recorder.to_host.ring.head


def test_no_collective_is_added_to_a_step(reader: StoreReader, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks tell each other in a step is counted with every row captured, and without a tap."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions go to the workers
    monkeypatch.setenv("VLLM_TAP_ARM", ",".join(SITES_OF["qwen3"]))
    said = []
    for tapped in (True, False):
        if not tapped:
            monkeypatch.delenv("VLLM_TAP_ENDPOINT")
        engine = of_ranks("qwen3, two K/V heads", 2, reader)
        try:
            engine.llm.collective_rpc(count)
            engine.run([tokens(20, seed=seed) for seed in range(4)], [{"max_tokens": 40, **GREEDY}] * 4,
                       [{"codec": "raw"} if tapped else None] * 4)
            said.append(by_step(engine.llm.collective_rpc(counted)))
        finally:
            engine.close()
    assert said[0] == said[1]
    sums = 1 + 2 * 4  # of the embedding, and two a layer
    assert all(sums in {number for name, number in each.items() if "all" in name and "reduce" in name}
               for each in said[0]), said[0]
