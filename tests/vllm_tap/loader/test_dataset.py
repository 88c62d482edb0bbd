"""The training loader: every row once, the right numbers under the right names, mixed, and resumable."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

from torch.utils.data import DataLoader  # noqa: E402

from schemas import codecs  # noqa: E402
from schemas.errors import CorruptError, NotFoundError, SpecError  # noqa: E402
from schemas.ids import new_ulid  # noqa: E402
from schemas.read.reader import StoreReader  # noqa: E402
from schemas.read.slices import RowFormat  # noqa: E402
from schemas.store.segment import parse_frame  # noqa: E402
from tests.support.processes import PATIENCE_S  # noqa: E402
from tests.support.store_helpers import ROOT, Sender, WriterProcess, engine_info, expected_pieces, until  # noqa: E402
from vllm_tap import open_store  # noqa: E402
from vllm_tap.errors import MissingRows  # noqa: E402
from vllm_tap.loader import row_files  # noqa: E402
from vllm_tap.loader.dataset import RowDataset, activations, rows  # noqa: E402
from vllm_tap.loader.row_decode import decode  # noqa: E402
from vllm_tap.loader.row_files import RowFiles, _stretches  # noqa: E402
from vllm_tap.loader.row_window import WindowMemory  # noqa: E402
from writer_service.upkeep.erasing import erase  # noqa: E402

WIDTH = 72  # not a multiple of int8b64's block
LENGTHS = [3 + n * 7 % 90 for n in range(120)]  # tokens of each capture: neither all alike nor in step with frames
CODECS = {"resid_post": "int8b64", "mlp_out": "raw16"}


@dataclass
class Made:
    """A store whose rows follow from (number of the capture, position, layer)."""

    path: Path
    ids: list[str]  # by number; the last was captured as raw, of resid_post alone

    @property
    def rows(self) -> int:
        return sum(LENGTHS)

    def number(self, capture: str) -> int:
        return self.ids.index(capture)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    path = tmp_path_factory.mktemp("rows") / "store"
    ids = [new_ulid() for _ in range(len(LENGTHS) + 1)]
    layers = {site: [0, 1, 2, 3] for site in CODECS}
    with WriterProcess(path, "--seal-idle-s", "0.3", "--segment-bytes", "1000000") as writer, Sender(
            writer.endpoint, engine=engine_info(WIDTH, dtype="bfloat16", sites=tuple(CODECS))) as sender:
        for number, capture in enumerate(ids[:-1]):
            sender.own(capture, tags={"half": str(number % 2)})
            sender.send(open_record(sender, capture, layers, CODECS))
        # Frames hold several captures, and a capture lies in several frames, as from an engine.
        flat = [(capture, number, position) for number, capture in enumerate(ids[:-1])
                for position in range(LENGTHS[number])]
        for begin in range(0, len(flat), 50):
            part = [(capture, number, [p for *_, p in group]) for (capture, number), group in
                    itertools.groupby(flat[begin:begin + 50], lambda row: row[:2])]
            runs = [25, len(flat[begin:begin + 50]) - 25] if len(flat[begin:begin + 50]) > 25 else None
            for site, codec in CODECS.items():
                sender.frame(part, runs, codec=codec, width=WIDTH, dtype="bfloat16", site=site)
        for number, capture in enumerate(ids[:-1]):
            sender.finish(capture, LENGTHS[number], output=LENGTHS[number] - 3 + 1)
        sender.open(ids[-1], 3, {"resid_post": [0, 1, 2, 3]}, "raw")
        sender.frame([(ids[-1], 120, [0, 1, 2])], codec="raw", width=WIDTH, dtype="bfloat16")
        sender.finish(ids[-1], 3, output=1)
        sender.wait()
        with StoreReader(path) as reader:
            until(lambda: reader.capture(ids[-1]).status == "complete")
            assert {row.status for row in reader.captures(limit=1000)} == {"complete"}
        yield Made(path, ids)


def open_record(sender: Sender, capture: str, layers: dict[str, list[int]], codec: dict[str, str]) -> Any:
    from schemas.spec import Resolved
    from schemas.wire.records import Open

    return Open(sender.next(), capture, "r", "{}", Resolved(layers, codec, "all", "recompute"), 3,
                np.arange(3, dtype="<u4").tobytes(), 0, 1)


def truth(number: int, site: str, layer: int, positions: list[int]) -> Any:
    """The rows as they decode, float32 ``[n, WIDTH]``."""
    pieces = expected_pieces(number, positions, [layer], CODECS[site], WIDTH, "bfloat16")
    typed = {s.name: pieces[s.name].view(s.dtype).reshape(1, len(positions), *s.shape)
             for s in codecs.streams(CODECS[site], WIDTH, "bfloat16")}
    return codecs.decode(CODECS[site], typed, WIDTH, "bfloat16")[0]


def who(made: Made, data: RowDataset, batches: Any) -> list[tuple[int, int]]:
    """(number of the capture, position) of every row, in the order in which they came."""
    return [(made.number(data.captures[c]), p) for batch in batches
            for c, p in zip(batch["capture"].tolist(), batch["position"].tolist(), strict=True)]


EVERY = [(number, position) for number, length in enumerate(LENGTHS) for position in range(length)]


def test_every_row_once_with_its_numbers(made: Made) -> None:
    data = rows(made.path, "blocks.2.hook_resid_post", codec="int8b64", batch=64, window=300)
    assert data.rows == made.rows and data.names == ["resid_post.2"] and data.window == 320
    batches = list(data)
    assert len(batches) == data.batches() and {len(batch["position"]) for batch in batches[:-1]} == {64}
    assert sorted(who(made, data, batches)) == EVERY
    for batch in batches:
        assert batch["resid_post.2"].dtype == torch.float32
        assert torch.equal(batch["token_id"], batch["position"] + 5000)
        for row, capture, position in zip(batch["resid_post.2"], batch["capture"], batch["position"], strict=True):
            want = truth(made.number(data.captures[capture]), "resid_post", 2, [int(position)])[0]
            assert row.numpy().tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_several_sites_and_layers_come_aligned(made: Made, dtype: Any) -> None:
    data = rows(made.path, ["resid_post.3", "blocks.1.hook_mlp_out", "resid_post.0"], where={"half": "1"}, batch=50,
                dtype=dtype, verify=True)
    assert data.names == ["resid_post.3", "mlp_out.1", "resid_post.0"]
    batches = list(data)
    seen = who(made, data, batches)
    assert sorted(seen) == [(number, position) for number, position in EVERY if number % 2]
    for batch in batches[:3]:
        for name in data.names:
            site, layer = name.split(".")
            want = np.concatenate([truth(number, site, int(layer), [position])
                                   for number, position in who(made, data, [batch])])
            assert torch.equal(batch[name], torch.from_numpy(want).to(dtype)), name


def test_the_same_seed_is_the_same_order_and_another_is_not(made: Made) -> None:
    def order(**options: Any) -> list[tuple[int, int]]:
        data = rows(made.path, "resid_post", 1, codec="int8b64", batch=64, window=512, **options)
        return who(made, data, data)

    assert order(seed=3) == order(seed=3) != order(seed=4)
    assert order(shuffle=False) == EVERY
    data = rows(made.path, "resid_post", 1, codec="int8b64", batch=64, window=512)
    first = who(made, data, data)
    assert who(made, data, data) == first  # the same epoch again
    data.set_epoch(1)
    second = who(made, data, data)
    assert second != first and sorted(second) == sorted(first)


@pytest.mark.parametrize("codec", ["int8b64", "raw16"])
def test_four_workers_of_two_ranks_have_every_row_once(made: Made, codec: str) -> None:
    site = {value: key for key, value in CODECS.items()}[codec]
    seen = []
    for rank in range(2):
        data = rows(made.path, site, 2, codec=codec, batch=32, window=128, rank=rank, world=2, dtype=torch.bfloat16)
        batches = list(DataLoader(data, batch_size=None, num_workers=4))
        assert len(batches) == data.batches(workers=4)
        seen += who(made, data, batches)
        number, position = seen[-1]
        want = torch.from_numpy(truth(number, site, 2, [position])).to(torch.bfloat16)
        assert torch.equal(batches[-1][f"{site}.2"][-1:], want)
    assert sorted(seen) == EVERY


def test_rows_are_mixed(made: Made) -> None:
    """As stated: neighbours come from the same block with a chance of block / window."""
    window = 2048
    data = rows(made.path, "resid_post", 1, codec="int8b64", batch=64, window=window, seed=5)
    where = {row: n for n, row in enumerate(EVERY)}
    order = np.asarray([where[row] for row in who(made, data, data)])
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 3 / np.sqrt(len(order) / 128)
    together = float((order[1:] // 128 == order[:-1] // 128).mean())
    stated = 128 / window
    assert stated / 2 < together < stated * 2
    # A window that holds everything is a perfect shuffle: a neighbour follows its neighbour as often as chance has it.
    perfect = rows(made.path, "resid_post", 1, codec="int8b64", batch=64, seed=5)
    order = np.asarray([where[row] for row in who(made, perfect, perfect)])
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.05
    assert (np.diff(order) == 1).mean() < 5 / len(order)


def test_an_iteration_goes_on_where_another_was_left(made: Made) -> None:
    def fresh() -> RowDataset:
        return rows(made.path, "resid_post", 1, codec="int8b64", batch=64, window=512, seed=9)

    data = fresh()
    data.set_epoch(2)
    whole = who(made, data, data)
    for taken in (0, 1, 8, 11, data.batches()):
        left = fresh()
        left.set_epoch(2)
        list(itertools.islice(left, taken))
        state = json.loads(json.dumps(left.state_dict()))  # as it comes back out of a checkpoint
        again = fresh()
        again.load_state_dict(state)
        assert who(made, again, again) == whole[taken * 64:], taken
        assert who(made, again, again) == whole  # only the next iteration is shortened
    again.load_state_dict({**state, "done": {"1": 5}})
    with pytest.raises(SpecError, match="says nothing of worker 0"):
        next(iter(again))
    with pytest.raises(SpecError, match="seed = 8"):
        rows(made.path, "resid_post", 1, codec="int8b64", batch=64, window=512, seed=8).load_state_dict(state)


@pytest.mark.parametrize("taken", [1, 7, 40, 86])
def test_a_loader_of_several_workers_goes_on_where_it_was_left(made: Made, taken: int) -> None:
    data = rows(made.path, "resid_post", 1, codec="int8b64", batch=64, window=512, seed=9)
    loader = DataLoader(data, batch_size=None, num_workers=3)
    whole = [who(made, data, [batch]) for batch in loader]
    data.load_state_dict(json.loads(json.dumps(data.state_after(taken, workers=3))))
    assert len(whole) == data.batches(workers=3) and [who(made, data, [batch]) for batch in loader] == whole[taken:]
    data.load_state_dict(data.state_after(taken, workers=3))
    with pytest.raises(SpecError, match="workers"):
        next(iter(data))


def test_activations_never_end_and_go_on(made: Made) -> None:
    def fresh() -> Any:
        return activations(made.path, "blocks.1.hook_resid_post", batch=1000, codec="int8b64", window=2000, seed=2)

    provider = fresh()
    assert provider.d_in == WIDTH
    epochs = made.rows * 2.5
    taken = [next(provider) for _ in range(int(epochs / 1000))]
    assert {(batch.shape, batch.dtype) for batch in taken} == {((1000, WIDTH), torch.float32)}
    # Two epochs have every row twice.
    flat = torch.cat(taken)[:2 * made.rows].numpy()
    assert set(np.unique(flat, axis=0, return_counts=True)[1] % 2) == {0}
    assert not torch.equal(taken[0], torch.from_numpy(flat[made.rows:made.rows + 1000]))
    for left in (0, 3, 6, 11):
        again = fresh()
        for _ in range(left):
            next(again)
        other = fresh()
        other.load_state_dict(json.loads(json.dumps(again.state_dict())))
        assert torch.equal(next(other), taken[left]) and torch.equal(next(other), taken[left + 1])


def test_activations_of_a_rank_without_rows_are_refused(made: Made) -> None:
    options: dict[str, Any] = {"codec": "int8b64", "batch": 100, "world": 101}
    units = len(rows(made.path, "resid_post.1", codec="int8b64").units) - 1
    assert len(next(activations(made.path, "resid_post.1", rank=units - 1, **options))) == 100
    with pytest.raises(SpecError, match=f"^rank = {units}: has no rows: {units} units of at most 128 are shared by"):
        activations(made.path, "resid_post.1", rank=units, **options)


def test_an_sae_trains_on_it(made: Made) -> None:
    """The loop of an SAE trainer: a data provider, a reconstruction that gets better."""
    torch.manual_seed(0)
    encoder, decoder = torch.nn.Linear(WIDTH, 128), torch.nn.Linear(128, WIDTH)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=3e-3)
    losses = []
    for x in itertools.islice(activations(made.path, "resid_post.2", batch=128, codec="int8b64"), 60):
        x = (x - x.mean()) / x.std()
        codes = torch.relu(encoder(x))
        loss = (decoder(codes) - x).pow(2).mean() + 1e-4 * codes.abs().sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_what_cannot_be_had_is_refused(made: Made, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"raw.*choose with codec"):
        rows(made.path, "resid_post", 1)
    assert rows(made.path, "resid_post", 1, codec="raw").captures == [made.ids[-1]]
    assert rows(made.path, "resid_post", 1, where=lambda row: row.id == made.ids[4]).rows == LENGTHS[4]
    with open_store(made.path) as store:
        assert rows(store, "resid_post", 1, where={"half": "0"}).rows == sum(LENGTHS[::2])
    assert rows(made.path, "mlp_out", np.array([1, 3])).names == ["mlp_out.1", "mlp_out.3"]
    assert rows(made.path, "mlp_out", np.int64(3)).names == ["mlp_out.3"]
    with pytest.raises(NotFoundError, match=r"no rows of resid_post\.9"):
        rows(made.path, "resid_post", 9)
    with pytest.raises(NotFoundError, match=r"attn_out\.1"):
        rows(made.path, "attn_out", 1)
    for bad, word in (({"site": "resid_post"}, "name a layer"), ({"site": "resid"}, "unknown site"),
                      ({"site": [], "layer": 1}, "at least one"), ({"site": "mlp_out", "layer": [1, 1]}, "each once"),
                      ({"site": "mlp_out", "layer": True}, "^layer = True"),
                      ({"site": "mlp_out", "layer": slice(0, 2)}, "^layer = slice")):
        with pytest.raises(SpecError, match=word):
            rows(made.path, **bad)
    for options, word in (({"batch": 0}, "batch"), ({"dtype": torch.int8}, "dtype"), ({"rank": 2, "world": 2}, "rank"),
                          ({"seed": -1}, "seed"), ({"window": 0}, "window"), ({"rank": 1}, "rank"),
                          ({"where": "run"}, "where"), ({"where": {"half": 1}}, "where"),
                          ({"batch": "256"}, "batch"), ({"seed": "a"}, "seed"), ({"window": 1.5}, "window")):
        with pytest.raises(SpecError, match=f"^{word} = "):
            rows(made.path, "mlp_out", 1, **options)
    with pytest.raises(SpecError, match=r"^batch = 1000000000: at most"):
        activations(made.path, "mlp_out.1", batch=10**9)
    with pytest.raises(SpecError, match=r"^state = {'epoch': 1}: valid: what state_dict gave"):
        activations(made.path, "mlp_out.1", batch=8).load_state_dict({"epoch": 1})
    with pytest.raises(NotFoundError, match=r"where = {'half': '2'} chooses has these sites"):
        rows(made.path, "mlp_out", 1, where={"half": "2"})


@pytest.mark.parametrize("codec", list(codecs.CODECS))
@pytest.mark.parametrize("model", ["bfloat16", "float16", "float32"])
def test_fast_decoding_is_what_decoding_is(codec: str, model: str) -> None:
    from engine_side.codecs import encode

    identity = codecs.parse_codec(f"{codec}:head=24" if codecs.CODECS[codec].sites else codec).identity
    torch.manual_seed(1)
    x = (torch.randn(40, WIDTH) * torch.logspace(-3, 3, 40)[:, None]).to(getattr(torch, model))
    pieces = encode(identity, x)
    kind = RowFormat(identity, model, WIDTH)
    typed, stored = {}, {}
    for stream in kind.streams:
        array = pieces[stream.name].contiguous().view(torch.uint8).numpy()
        stored[stream.name] = array.reshape(40, stream.nbytes)
        typed[stream.name] = stored[stream.name].view(stream.dtype).reshape(40, *stream.shape)
    want = torch.from_numpy(codecs.decode(identity, typed, WIDTH, model))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(decode(kind, stored, dtype), want.to(dtype)), dtype


@pytest.fixture
def sealed_copy(made: Made, tmp_path: Path) -> Path:
    def all_sealed() -> bool:
        with StoreReader(made.path) as reader:
            return all(reader.segment(number).sealed for codec in ("int8b64", "raw")
                       for number in rows(made.path, "resid_post", 1, codec=codec).index.segments)

    assert until(all_sealed)
    return Path(shutil.copytree(made.path, tmp_path / "store"))


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("moment", ["_read", "_stale"])
def test_a_dataset_of_before_hands_out_no_erased_row(made: Made, sealed_copy: Path, verify: bool, moment: str) -> None:
    """Whether heads were parsed before the erasure or after it, and whether it came before or after the copy."""
    gone = made.ids[4]
    data = rows(sealed_copy, "resid_post", 1, where=lambda row: row.id in made.ids[3:6], codec="int8b64", batch=8,
                window=8, shuffle=False, verify=verify)
    of_gone = np.flatnonzero(data.index.capture == data.captures.index(gone))[:1]
    segment = int(data.index.frames[data.index.frame[0][of_gone[0]], 0])

    class ErasedMeanwhile(RowFiles):
        moments: ClassVar[list[str]]

        def _erase(self, now: str) -> None:
            self.moments.append(now)
            if self.moments.count(moment) == 1 and now == moment:
                assert erase(sealed_copy, data.index.uuid, segment, [gone])

        def _read(self, *piece: Any) -> None:
            self._erase("_read")
            super()._read(*piece)

        def _stale(self, *frame: Any) -> bool:
            self._erase("_stale")
            return super()._stale(*frame)

    parsed = iter(data)
    next(parsed)
    files = ErasedMeanwhile(data.index, verify)
    files.moments = []
    with pytest.raises(NotFoundError, match=gone):
        files.copy([0], of_gone, WindowMemory().take(data.index, 1), np.zeros(1, np.int64))
    assert files.moments == ["_read"] * 4 + ["_stale"]  # and then it was seen, before anything was read once more
    files.close()
    for batches in (parsed, iter(data)):
        with pytest.raises(NotFoundError, match=gone):
            list(batches)
    beside = rows(sealed_copy, "resid_post", 1, where=lambda row: row.id in (made.ids[3], made.ids[5]),
                  codec="int8b64", verify=verify)
    for batch in beside:
        for row, capture, position in zip(batch["resid_post.1"], batch["capture"], batch["position"], strict=True):
            want = truth(made.number(beside.captures[capture]), "resid_post", 1, [int(position)])[0]
            assert row.numpy().tobytes() == want.tobytes()


def test_a_damaged_row_is_noticed_where_it_is_asked_for(sealed_copy: Path) -> None:
    """With ``verify`` no damaged byte is trained on, and none that nobody asked for is in the way."""
    def data(layer: int, verify: bool) -> RowDataset:
        return rows(sealed_copy, "resid_post", layer, codec="int8b64", verify=verify)

    index = data(1, verify=True).index
    number, offset = index.frames[index.frame[0][0]].tolist()
    main, = (sealed_copy / "blocks").glob(f"*{number:08d}.zarr/q/c/0/0/0")
    stored = bytearray(main.read_bytes())
    view = parse_frame(memoryview(stored), offset, index.uuid, number, main)
    piece = int(view.pieces([1], [index.row[0][0]])[0, 0])
    stored[offset + view.layout.parts[0] + piece * WIDTH] ^= 0xFF
    main.write_bytes(stored)
    with pytest.raises(CorruptError, match="fsck"):
        list(data(1, verify=True))
    assert [sum(len(batch["position"]) for batch in data(*asked)) for asked in ((2, True), (1, False))] == [
        index.rows, index.rows]


def test_what_was_decoded_stays_while_it_is_looked_at() -> None:
    memory = WindowMemory()
    first = memory.lend(2, 4, 8)
    where = first.ctypes.data
    rest = torch.from_numpy(first).view(torch.float32)[1:]
    second = memory.lend(2, 4, 8)
    del first
    assert len({where, second.ctypes.data, memory.lend(2, 4, 8).ctypes.data}) == 3
    del rest
    again = WindowMemory()
    where = again.lend(2, 4, 8).ctypes.data
    other = again.lend(2, 3, 8)
    assert again.lend(2, 4, 8).ctypes.data == where != other.ctypes.data


@pytest.mark.parametrize("site", list(CODECS))
def test_rows_that_lie_apart_are_read_apart(made: Made, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> list[Any]:
        data = rows(made.path, site, 2, codec=CODECS[site], batch=64, window=512, where={"half": "1"})
        return [batch[f"{site}.2"] for batch in data]

    near = read()
    monkeypatch.setattr(row_files, "_GAP_BYTES", 0)
    monkeypatch.setattr(row_files, "_SCRATCH_BYTES", 5 * WIDTH)
    assert all(torch.equal(a, b) for a, b in zip(near, read(), strict=True))


def test_stretches_hold_every_piece_within_bounds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        pieces = np.sort(rng.choice(rng.integers(60, 400), rng.integers(1, 60), replace=False))
        nbytes, most = int(rng.choice([16, 8192, 20_000])), int(rng.integers(1, 50))
        runs = list(_stretches(pieces, nbytes, most))
        assert np.concatenate([pieces[a:b] for a, b in runs]).tolist() == pieces.tolist()
        for a, b in runs:
            assert pieces[b - 1] - pieces[a] < most
            assert (np.diff(pieces[a:b]) * nbytes <= max(row_files._GAP_BYTES, nbytes)).all()
    assert list(_stretches(np.arange(7, 20), 8192, 100)) == [(0, 13)]


def test_batches_stay_as_they_were_while_windows_take_turns(made: Made) -> None:
    """Batches of what is stored as wanted are views of a window, whose memory the next one takes when they are gone."""
    data = rows(made.path, "mlp_out", 1, batch=64, window=320, dtype=torch.bfloat16)
    for epoch in range(2):
        data.set_epoch(epoch)
        held, then = [], []
        for batch in data:
            held.append(batch["mlp_out.1"])
            then.append(held[-1].clone())
            if len(held) % 12 == 0:
                held[:], then[:] = held[-3:], then[-3:]
            assert all(torch.equal(a, b) for a, b in zip(held, then, strict=True))
    memory = WindowMemory()
    first = memory.take(data.index, 10)
    assert memory.take(data.index, 10) is not first  # of another iteration
    looked_at = first[0]["x"][2:4]
    memory.give(first, [weakref.ref(looked_at)])
    second = memory.take(data.index, 10)
    assert second is not first
    memory.give(second, [])
    assert memory.take(data.index, 9) is second
    memory.give(first, [weakref.ref(looked_at)])
    seen_through = torch.from_numpy(looked_at)[1:]
    del looked_at
    assert memory.take(data.index, 10) is not first
    memory.give(first, [])
    assert memory.take(data.index, 11) is not first
    memory.give(first, [])
    assert copy.deepcopy(memory).take(data.index, 1)[0]["x"].shape == (1, 2 * WIDTH)  # as when it is pickled: empty
    assert memory.take(data.index, 10) is first and len(seen_through) == 1


ABANDONED = """
import ctypes, sys
from vllm_tap import activations, open_store, rows
store = open_store(sys.argv[1])
one = iter(rows(store, "resid_post", 2, codec="int8b64", batch=8))
other = activations(store, "resid_post.2", 8, codec="int8b64", verify=True)
next(one), next(other)
def kept(): pass  # as a handler of a signal is, or what a library was given to call: it keeps this script's names
names = ("vllm_tap.", "schemas.")
for each in (kept, *(module for name, module in sys.modules.items() if name.startswith(names))):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
"""


def test_an_iterator_that_is_left_ends_with_the_interpreter_without_a_word(made: Made) -> None:
    """By then nothing is left of what modules have imported."""
    done = subprocess.run([sys.executable, "-c", ABANDONED, str(made.path)], capture_output=True, text=True,
                          timeout=PATIENCE_S, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def holed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A store of two captures: all rows are there of the first, two lack of the second's layer 3."""
    path, ids = tmp_path_factory.mktemp("holed") / "store", [new_ulid(), new_ulid()]
    with WriterProcess(path) as writer, Sender(writer.endpoint, engine=engine_info()) as sender:
        for number, capture in enumerate(ids):
            sender.own(capture, tags={"number": str(number)})
            sender.open(capture, 8)
            if number:
                sender.frame([(capture, number, range(8))], layers=[0, 1, 2])
                sender.frame([(capture, number, [0, 1, 4, 5, 6, 7])], layers=[3])
                sender.dropped(capture, 2, 4, layers=[3])
            else:
                sender.frame([(capture, number, range(8))])
            sender.finish(capture, 8, output=1)
        sender.wait()
        with StoreReader(path) as reader:
            until(lambda: {reader.capture(capture).status for capture in ids} == {"complete", "incomplete"})
    return path, ids


def test_missing_rows_are_told_where_they_are_not_allowed(holed: tuple[Path, list[str]]) -> None:
    path, ids = holed
    assert rows(path, "resid_post", 3).rows == 14
    with pytest.raises(MissingRows, match=rf"resid_post, layer 3 of capture {ids[1]} lacks positions \[2, 4\) dropped"):
        rows(path, "resid_post", [1, 3], allow_missing=False)
    assert rows(path, "resid_post", [1, 2], allow_missing=False).rows == 16
    assert rows(path, "resid_post", 3, where={"number": "0"}, allow_missing=False).rows == 8
