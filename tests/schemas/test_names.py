"""TransformerLens names that are one site on most models and another on some: each capture's own model decides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from safetensors.numpy import load

from engine_side.tap.architectures import ARCHITECTURES, lens_names
from schemas.checks import parse_arm
from schemas.errors import NotArmedError, SpecError, StartError
from schemas.ids import new_ulid
from schemas.sites import BY_MODEL, SITES, parse_site, transformer_lens_name
from schemas.spec import Armed, parse_spec, resolve
from tests.support.api_stack import Stack, stack_in
from tests.support.engines.engine_player import LAYERS, EnginePlayer, rows
from vllm_tap import Client, open_store
from vllm_tap.client.listing import Filters
from vllm_tap.export.command import choose

EVERY = list(range(LAYERS))
FOUR = ("attn_out", "attn_out_raw", "mlp_out", "mlp_out_raw")
PROMPT = [1, 2, 3]


def armed(architecture: str, *sites: str) -> Armed:
    return Armed(dict.fromkeys(sites, EVERY) | {site: [0] for site in sites if not SITES[site].per_layer}, LAYERS,
                 names=dict(lens_names([architecture])))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_spec_means_what_transformer_lens_means_on_this_model(architecture: str) -> None:
    """As tests/engine/test_lens.py measures it: on Gemma these are what a module returns before its norm."""
    raw = "_raw" if architecture.startswith("Gemma") else ""
    known = armed(architecture, *FOUR, "embed")
    spec = parse_spec({"sites": ["blocks.1.attn.hook_out", "blocks.2.mlp.hook_out", "blocks.3.hook_attn_out"],
                       "codec": {"blocks.2.mlp.hook_out": "raw", "attn_out": "raw"}} if raw else
                      {"sites": ["blocks.1.attn.hook_out", "blocks.2.mlp.hook_out"]})
    wanted = {f"attn_out{raw}": [1], f"mlp_out{raw}": [2]} | ({"attn_out": [3]} if raw else {})
    found = resolve(spec, known)
    assert found.layers == wanted and (not raw or found.codec["mlp_out_raw"] == "raw")
    embed = [parse_spec({"sites": [name]}) for name in ("hook_embed", "embed.hook_out")]
    for each in embed:
        if raw:
            with pytest.raises(SpecError, match=r"as they enter the first block.*ask for embed or resid_pre\.0"):
                resolve(each, known)
        else:
            assert resolve(each, known).layers == {"embed": [0]}
    assert transformer_lens_name("attn_out", 1, known.names) == "blocks.1.hook_attn_out"
    assert transformer_lens_name("mlp_out_raw", 1, known.names) == ("blocks.1.mlp.hook_out" if raw else None)
    assert transformer_lens_name("embed", 0, known.names) == (None if raw else "hook_embed")
    with pytest.raises(NotArmedError):  # never the other one
        resolve(parse_spec({"sites": ["blocks.1.attn.hook_out"]}), armed(architecture, *(
            ["attn_out", "mlp_out"] if raw else ["attn_out_raw", "mlp_out"])))


def test_where_no_model_is_known_the_site_must_be_named() -> None:
    for named in BY_MODEL.values():
        for name in named.lens:
            with pytest.raises(SpecError, match=f"ask for {named.sites[0]} or {named.sites[1]}"):
                parse_site(name.format(l=3))
            with pytest.raises(StartError, match=f"ask for {named.sites[0]}"):
                parse_arm("--arm", name.format(l=3))
    with pytest.raises(SpecError, match=r"before the norm's weight; final_norm \(ln_final\.hook_out\) is after it"):
        parse_site("ln_final.hook_normalized")


@dataclass
class Played:
    """Captures of models that mean different things by a name: ``sender``'s id of each."""

    stack: Stack
    gemma: str
    llama: str
    older: str  # of an engine that did not say


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    with stack_in(tmp_path_factory.mktemp("names")) as stack:
        stack.start_writer()
        stack.processes["writer"].wait_ready()
        ids = []
        for number, known in enumerate((armed("Gemma3ForCausalLM", *FOUR), armed("LlamaForCausalLM", *FOUR[::2]),
                                        Armed(dict.fromkeys(FOUR, EVERY), LAYERS))):
            engine = EnginePlayer(stack.endpoint, "float32", armed=known)
            ids.append(new_ulid())
            resolved = engine.open(ids[-1], parse_spec({"codec": "raw"}), PROMPT)
            engine.send_rows(ids[-1], number, resolved, len(PROMPT), [*PROMPT, 4], [0, 1, 2])
            engine.finish(ids[-1], "stop", [4], 3)
            engine.close()
        stack.start_api("http://127.0.0.1:9")
        yield Played(stack, *ids)


@pytest.mark.parametrize(("name", "site"), [
    ("blocks.2.attn.hook_out", "attn_out"), ("blocks.2.mlp.hook_out", "mlp_out")])
def test_every_reader_gives_the_tensor_that_the_name_means(played: Played, name: str, site: str) -> None:
    client, store = Client(played.stack.url), open_store(played.stack.store)
    for number, (capture, meant) in enumerate([(played.gemma, f"{site}_raw"), (played.llama, site)]):
        right = rows(number, meant, 2, [0, 1, 2], "float32")
        for source in (client.capture(capture), store[capture]):
            assert np.array_equal(source[name], right)
            assert list(source.to_numpy(name)) == [f"{meant}.2"]
            said = {info.site: info.transformer_lens for info in source.manifest().sites}
            assert said[site] == f"blocks.{{l}}.hook_{site}"
            assert meant == site or said[meant] == f"blocks.{{l}}.{name.partition('2.')[2]}"
            assert (f"blocks.2.hook_{site}" in source.to_torch()) and (meant == site or name in source.to_torch())
        assert np.array_equal(store.reader.slice(capture, name, [2]).values()[0], right)
        assert choose(store.reader.manifest(capture), name, "all") == {meant: [2]}
        answer = played.stack.http.get(f"/v1/captures/{capture}/activations", params={"site": name})
        assert np.array_equal(load(answer.content)[f"{meant}.2"], right)
    assert {row.id for row in Filters(site=name).of(store.reader)} == {played.gemma, played.llama, played.older}
    store.close()


def test_a_capture_whose_model_did_not_say_names_what_to_ask_for(played: Played) -> None:
    """Recorded before names were kept, or by an engine of another make."""
    name = "blocks.2.attn.hook_out"
    with open_store(played.stack.store) as store:
        for read in (lambda: store[played.older][name], lambda: store.reader.slice(played.older, name, [2]),
                     lambda: choose(store.reader.manifest(played.older), name, "all")):
            with pytest.raises(SpecError, match="ask for attn_out or attn_out_raw"):
                read()
        assert np.array_equal(store[played.older]["blocks.2.hook_attn_out"],
                              rows(2, "attn_out", 2, [0, 1, 2], "float32"))
    answer = played.stack.http.get(f"/v1/captures/{played.older}/activations", params={"site": name})
    assert answer.status_code == 400 and "ask for attn_out or attn_out_raw" in answer.text, answer.text
