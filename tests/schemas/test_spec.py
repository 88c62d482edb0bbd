"""The capture spec: what is accepted, what it resolves to, and that every refusal names field, value and way out."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import LimitError, NotArmedError, SpecError
from schemas.ids import new_ulid
from schemas.limits import position_max
from schemas.sites import SITES, parse_site, transformer_lens_name
from schemas.spec import Armed, intervals, parse_spec, resolve

ARMED = Armed({"resid_post": [0, 1, 2, 3], "attn_out": [1, 3]}, n_layers=4)


@pytest.mark.parametrize(
    ("spec", "layers"),
    [
        ({}, {"resid_post": [0, 1, 2, 3], "attn_out": [1, 3]}),
        ({"sites": ["resid_post"], "layers": "all"}, {"resid_post": [0, 1, 2, 3]}),
        ({"sites": ["resid_post"], "layers": "::2"}, {"resid_post": [0, 2]}),
        ({"sites": ["resid_post"], "layers": "-2:"}, {"resid_post": [2, 3]}),
        ({"sites": ["blocks.1.hook_out", "resid_post.3"]}, {"resid_post": [1, 3]}),
        ({"sites": ["blocks.1.hook_attn_out", "resid_post"], "layers": [1]}, {"attn_out": [1], "resid_post": [1]}),
        ({"sites": []}, {}),
        ({"layers": []}, {"resid_post": [], "attn_out": []}),
        ({"layers": [0, 1]}, {"resid_post": [0, 1], "attn_out": [1]}),
        ({"layers": "::2"}, {"resid_post": [0, 2]}),
    ],
)
def test_layers_resolve(spec: dict[str, Any], layers: dict[str, list[int]]) -> None:
    assert resolve(parse_spec(spec), ARMED).layers == layers


@pytest.mark.parametrize(
    ("spec", "field", "says"),
    [
        ({"site": ["resid_post"]}, "site", "unknown field"),
        ({"sites": ["nope"]}, "sites", "resid_post"),
        ({"sites": "resid_post"}, "sites", "a list of sites"),
        ({"sites": ["mlp_out"]}, "sites", "not armed; armed: resid_post, attn_out"),
        ({"sites": ["attn_out"], "layers": [0]}, "layers", "not armed for attn_out; armed: [1, 3]"),
        ({"sites": ["attn_out.2"]}, "sites", "not armed for attn_out; armed: [1, 3] (start the engine"),
        ({"sites": ["blocks.9.hook_out"]}, "sites", "layers 0 to 3"),
        ({"sites": ["resid_post.1"], "layers": [2]}, "layers", "does not contain"),
        ({"layers": [4]}, "layers", "0 to 3"),
        ({"layers": [True]}, "layers", "a list of layers"),
        ({"layers": "1"}, "layers", "a slice"),
        ({"layers": "::0"}, "layers", "a slice"),
        ({"layers": "3:1"}, "layers", "selects none of the layers 0 to 3"),
        ({"layers": "4:"}, "layers", "selects none"),
        ({"positions": "some"}, "positions", '"last_prompt"'),
        ({"positions": "last"}, "positions", '"last_prompt" is the last token of the prompt'),
        ({"positions": [-1]}, "positions", "[start, stop]"),
        ({"positions": [-1]}, "positions", "counted from 0"),
        ({"positions": [[-4, -1]]}, "positions", "counted from 0"),
        ({"layers": [-1]}, "layers", '"-1:" is the last'),
        ({"layers": [0, -4]}, "layers", "counted from 0"),
        ({"positions": [[5, 5]]}, "positions", "start < stop"),
        ({"positions": [2**40]}, "positions", "positions"),
        ({"codec": "zip"}, "codec", "int8b64"),
        ({"codec": "rp8:k=0"}, "codec", "a whole number from 1"),
        ({"codec": {"mlp_out": "raw"}}, "codec", "not captured"),
        ({"prefix_cache": "off"}, "prefix_cache", "recompute"),
        ({"return": "file"}, "return", "inline"),
        ({"probe": "toxicity"}, "probe", "a list of at most 64 names"),
        ({"sites": ["probe.toxicity"]}, "sites", "name a probe in the field probe"),
        ({"probe": ["toxicity"], "layers": [1]}, "layers", "name the sites whose layers"),
        ({"id": "../../etc/passwd"}, "id", "ULID"),
        ({"id": new_ulid().lower()}, "id", "ULID"),
        ({"tags": {"a/b": "x"}}, "tags", "A-Z"),
        ({"tags": {"a": 1}}, "tags", "strings"),
        ('{"sites": [', "", "malformed JSON"),
        ('{"sites":' + "[" * 30_000 + "]" * 30_000 + "}", "", "nested too deeply"),
        ({"positions": [10**12]}, "positions", "none above 2,147,483,647"),
        ("[]", "", "must be an object"),
        ("resid_post", "", "must be an object"),
        (7, "", "must be an object"),
    ],
)
def test_refusals_name_field_value_and_what_is_valid(spec: object, field: str, says: str) -> None:
    with pytest.raises(SpecError) as raised:
        resolve(parse_spec(spec), ARMED)
    assert raised.value.field == field
    assert says in str(raised.value)


HEADED = Armed({"resid_post": [0], "q": [0], "k": [0]}, n_layers=1, heads={"q": 64, "k": 64})


@pytest.mark.parametrize(("asked", "codec"), [
    ("raw", {"resid_post": "raw", "q": "raw", "k": "raw"}),
    ({"resid_post": "rp8:k=8"}, {"resid_post": "rp8:k=8,seed=0", "q": "int8b64", "k": "int8b64"}),
    ({"q": "qk8", "k": "kv8:head=64"},
     {"resid_post": "int8b64", "q": "qk8:head=64", "k": "kv8:head=64"}),
])
def test_codecs_resolve_to_their_identity(asked: object, codec: dict[str, str]) -> None:
    assert resolve(parse_spec({"codec": asked}), HEADED).codec == codec


@pytest.mark.parametrize(("asked", "says"), [
    ("kv8", "resid_post has no heads for it to encode; kv8 is for k, k_rot, v"),
    ({"q": "kv8"}, "q has no heads for it to encode"),
    ({"q": "qk8:head=32"}, "heads of q have 64 columns"),
    ({"resid_post": "rp8:k=9000"}, "valid at width 4096: k up to 2048"),
])
def test_codecs_that_do_not_fit_a_site_are_refused(asked: object, says: str) -> None:
    with pytest.raises(SpecError) as raised:
        resolve(parse_spec({"codec": asked}), HEADED, {"resid_post": 4096})
    assert raised.value.field == "codec" and says in str(raised.value)


def test_layers_of_every_site_must_be_armed_somewhere() -> None:
    armed = Armed({"resid_post": [0, 2], "mlp_out": [1], "embed": [0]}, 4)
    assert resolve(parse_spec({"layers": [2]}), armed).layers == {"resid_post": [2], "embed": [0]}
    assert resolve(parse_spec({"layers": "-2:"}), Armed({"embed": [0]}, 4)).layers == {"embed": [0]}
    with pytest.raises(SpecError, match=r"layers = \[3\]: not armed for any site; armed: resid_post \[0, 2\]; mlp_out"):
        resolve(parse_spec({"layers": [0, 3]}), armed)


def test_an_unarmed_site_is_its_own_error() -> None:
    with pytest.raises(NotArmedError):
        resolve(parse_spec({"sites": ["mlp_out"]}), ARMED)


@pytest.mark.parametrize("codec", ["int8b64", "raw16", {"resid_post": "int8b64"}, {"experts": "raw"}])
def test_ids_are_stored_raw_whatever_is_asked_for_the_rest(codec: object) -> None:
    armed = Armed({"resid_post": [0], "experts": [0]}, n_layers=1)
    assert resolve(parse_spec({"codec": codec}), armed).codec["experts"] == "raw"
    with pytest.raises(SpecError, match="ids, which other codecs would change; valid: raw"):
        resolve(parse_spec({"codec": {"experts": "raw16"}}), armed)


def test_a_spec_is_bounded_before_it_is_parsed() -> None:
    with pytest.raises(LimitError):
        parse_spec('{"tags": {"a": "' + "x" * 100_000 + '"}}')


def test_the_canonical_json_says_the_same_again() -> None:
    spec = parse_spec({"sites": ["resid_post.2"], "positions": "last_prompt", "return": "reference",
                       "tags": {"run": "7"}})
    assert parse_spec(spec.to_json()) == spec
    assert spec.positions == "last_prompt"


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=12))
def test_ranges_merge_to_the_same_positions(pairs: list[tuple[int, int]]) -> None:
    ranges = [(start, start + size) for start, size in pairs]
    resolved = resolve(parse_spec({"positions": [list(r) for r in ranges]}), ARMED)
    merged = intervals(resolved.positions, prompt_len=5)
    assert [p for a, b in merged for p in range(a, b)] == sorted({p for a, b in ranges for p in range(a, b)})
    assert all(a[1] < b[0] for a, b in itertools.pairwise(merged))


def test_named_positions() -> None:
    assert intervals("all", 7) == [(0, position_max)]
    assert intervals("prompt", 7) == [(0, 7)]
    assert intervals("generated", 7) == [(7, position_max)]
    assert intervals("last_prompt", 7) == [(6, 7)]


def test_only_positions_that_are_always_computed_read_the_prefix_cache() -> None:
    def chosen(positions: object) -> str:
        return resolve(parse_spec({"positions": positions}), ARMED).prefix_cache

    assert [chosen(p) for p in ("all", "prompt", [3])] == ["recompute"] * 3
    assert [chosen(p) for p in ("generated", "last_prompt", [])] == ["allow"] * 3


def test_every_transformer_lens_name_leads_back_to_its_site() -> None:
    for site in SITES.values():
        for name in site.lens:
            assert parse_site(name.format(l=11)) == (site.name, 11 if site.per_layer else None)
        if site.lens:
            printed = transformer_lens_name(site.name, 11)
            assert printed is not None and parse_site(printed)[0] == site.name


@pytest.mark.parametrize("codec", [
    {"blocks.0.hook_resid_post": "raw", "blocks.3.hook_resid_post": "raw16"}, {"resid_post.2": "raw"},
    {"resid_post": "raw", "blocks.1.hook_out": "raw16"}])
def test_a_codec_is_named_for_a_site_not_for_a_layer(codec: dict[str, str]) -> None:
    with pytest.raises(SpecError, match="one codec for all its layers"):
        resolve(parse_spec({"sites": ["resid_post"], "codec": codec}), Armed({"resid_post": [0, 1, 2, 3]}, 4))


@pytest.mark.parametrize("spec", [{"positions": [[n, n + 1] for n in range(9999)]}, {"layers": [0] * 9999}])
def test_lists_are_counted_before_they_are_looked_at(spec: dict[str, object]) -> None:
    with pytest.raises(LimitError, match="9999"):
        parse_spec(spec)


@pytest.mark.parametrize("layers", ["2:-", "-:2", ":-"])
def test_half_a_number_is_no_layer(layers: str) -> None:
    with pytest.raises(SpecError, match="layers"):
        parse_spec({"layers": layers})


def test_a_codec_may_be_named_as_its_only_layer_is() -> None:
    name = "blocks.3.hook_resid_post"
    resolved = resolve(parse_spec({"sites": [name], "codec": {name: "raw"}}), Armed({"resid_post": [0, 1, 2, 3]}, 4))
    assert (resolved.layers, resolved.codec) == ({"resid_post": [3]}, {"resid_post": "raw"})


@pytest.mark.parametrize(("name", "meant"), [
    ("resid_pst.12", "resid_post.12"), ("Resid_post", "resid_post"), ("resid_post.x", "resid_post"),
    ("resid_post.12345", "resid_post"), ("final_nrm.3", "final_norm"), ("blocks.3.hook_resid_pst",
                                                                        "blocks.3.hook_resid_post"),
    ("../../etc/passwd", None), ("resid_post" * 10_000, None), ("", None),
])
def test_a_misspelt_site_is_told_what_was_meant(name: str, meant: str | None) -> None:
    with pytest.raises(SpecError) as raised:
        parse_site(name)
    said = raised.value.reason
    assert "valid: resid_pre" in said and "resid_post.12" in said
    assert ("did you mean" in said) == (meant is not None)
    if meant is not None:
        assert f"did you mean {meant}? " in said and parse_site(meant)
