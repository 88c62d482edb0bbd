"""The page in a real browser: what a person sees and does, and that the numbers are the true ones.

`make page-test` runs it; without playwright and a Chromium it is skipped, and says so.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.api.page.conftest import CHROMIUM, NO_CHROMIUM
from tests.api.test_embedded import server
from tests.support.api_stack import Process, Stack, running, stack_in
from tests.support.engines.engine_player import WIDTH, rows
from vllm_tap.client.sweep_result import PatchSweep

playwright = pytest.importorskip("playwright.sync_api", reason="the page was NOT tested: `make page-test` installs "
                                                               "playwright and says how to get a browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
expect = playwright.expect

PROMPT = "The fox is here."
P, G = len(PROMPT), 8



@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("page")) as stack:
        yield stack


@pytest.fixture(scope="module")
def capture(stack: Stack) -> str:
    return made(stack, PROMPT, capture={"sites": ["resid_post", "attn_out"], "codec": "raw",
                                        "tags": {"animal": "fox"}})


@pytest.fixture(scope="module")
def holed(stack: Stack) -> str:
    return made(stack, PROMPT.replace("fox", "cat"), max_tokens=G + 3, play={"drop": ["resid_post", [1, 2], 8, 11],
                "cached": 4}, capture={"sites": ["resid_post"], "codec": "raw", "prefix_cache": "allow",
                                       "tags": {"animal": "cat"}})


def made(stack: Stack, prompt: str, **fields: Any) -> str:
    return str(stack.complete(prompt, **{"max_tokens": G, **fields}).json()["capture"]["id"])


def norm(layer: int, position: int, site: str = "resid_post") -> float:
    return float(np.linalg.norm(rows(0, site, layer, [position], "bfloat16")))


def shown(value: float) -> str:
    return f"{value:.4g}"


def look(page: Any, stack: Stack, fragment: str) -> Any:
    """Opens a capture; its first map."""
    page.goto(f"{stack.url}/#{fragment}")
    return page.locator("#map-0")


def told(page: Any, n: int = 0) -> Any:
    return page.locator(f"#map-{n}-told")


def cell(page: Any, layer: int, position: int, n: int = 0, rows: int = 4) -> dict[str, float]:
    """Where a cell's middle lies on the map's canvas, and how many different colours its inside has."""
    found: dict[str, float] = page.evaluate("""([n, row, column, rows]) => {
        const canvas = document.querySelector(`#map-${n} canvas`);
        const ratio = canvas.width / parseFloat(canvas.style.width);
        const columns = parseInt(canvas.dataset.columns), height = parseInt(canvas.dataset.cell.split("x")[1]);
        const width = parseInt(canvas.dataset.cell.split("x")[0]);
        const [x, y] = [column * width, (rows - 1 - row) * height];
        const inside = [x + 1, y + 1, width - 3, height - 3].map((length) => length * ratio);
        const data = canvas.getContext("2d").getImageData(...inside).data;
        const colours = new Set();
        for (let i = 0; i < data.length; i += 4) colours.add(data.slice(i, i + 4).join());
        return {x: x + width / 2, y: y + height / 2, colours: colours.size, columns};
    }""", [n, layer, position, rows])
    return found


def test_lists_and_searches(page: Any, stack: Stack, capture: str, holed: str) -> None:
    page.goto(stack.url)
    expect(page.get_by_text("animal=fox")).to_be_visible()
    expect(page.get_by_text("animal=cat")).to_be_visible()
    page.get_by_role("searchbox").fill("animal=fox")
    expect(page.get_by_text("animal=cat")).to_be_hidden()
    page.get_by_role("searchbox").press("Enter")
    expect(page.locator(".head .id")).to_have_text(capture)
    page.get_by_role("searchbox").fill("")
    page.get_by_label("status", exact=True).select_option("incomplete")
    expect(page.locator(".captures li")).to_have_count(1)
    page.get_by_role("searchbox").fill("nothing has this name")
    expect(page.get_by_text("Nothing matches.")).to_be_visible()
    page.get_by_role("searchbox").press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("no capture")


def test_hover_says_token_position_layer_and_value(page: Any, stack: Stack, capture: str) -> None:
    look(page, stack, capture).locator("canvas").hover(position=cell_of(page, 2, 5))
    tip = page.locator(".tip")
    expect(tip).to_contain_text("position 5 · layer 2")
    expect(tip).to_contain_text(f"norm {shown(norm(2, 5))}")
    expect(tip.locator("b")).to_have_text(PROMPT[5])


def cell_of(page: Any, layer: int, position: int) -> dict[str, float]:
    page.locator("#map-0 canvas[data-cell]").wait_for()
    where = cell(page, layer, position)
    return {"x": where["x"], "y": where["y"]}


def test_a_click_opens_the_row(page: Any, stack: Stack, capture: str) -> None:
    look(page, stack, capture).locator("canvas").click(position=cell_of(page, 3, 7))
    panel = page.get_by_role("region", name="row")
    x = rows(0, "resid_post", 3, [7], "bfloat16")[0]
    top = int(np.abs(x).argmax())
    expect(panel).to_contain_text("resid_post, layer 3, position 7")
    expect(panel).to_contain_text(f"{WIDTH} numbers · norm {shown(norm(3, 7))}")
    expect(panel.locator("tbody tr").first).to_contain_text(f"{top}{shown(float(x[top]))}")
    panel.get_by_role("button", name="close the row").click()
    expect(panel).to_be_hidden()


def test_the_keyboard_goes_everywhere(page: Any, stack: Stack, capture: str) -> None:
    area = look(page, stack, capture)
    area.focus()
    expect(told(page)).to_contain_text("position 0, layer 0")
    for key in ("ArrowRight", "ArrowRight", "ArrowUp"):
        area.press(key)
    expect(told(page)).to_have_text(f"token e, position 2, layer 1, norm {shown(norm(1, 2))}")
    area.press("End")
    expect(told(page)).to_contain_text(f"position {P + G - 2}, layer 1")
    for key in ("PageUp", "ArrowDown", "ArrowDown"):  # there is nothing below layer 0
        area.press(key)
    expect(told(page)).to_contain_text(f"position {P + G - 12}, layer 0")
    area.press("Enter")
    expect(page.get_by_role("region", name="row")).to_contain_text(f"layer 0, position {P + G - 12}")


def test_cosine_to_a_chosen_token(page: Any, stack: Stack, capture: str) -> None:
    area = look(page, stack, capture)
    area.locator("canvas").click(position=cell_of(page, 1, 6))
    page.get_by_label("Measure").select_option("cosine")
    page.get_by_role("button", name="Compare with the token at 6").click()
    expect(told(page)).to_have_text("token x, position 6, layer 1, cosine 1")
    area.focus()
    area.press("ArrowLeft")
    x = rows(0, "resid_post", 1, [5, 6], "bfloat16").astype(np.float64)
    expect(told(page)).to_contain_text(f"cosine {shown(float(x[0] @ x[1] / np.prod(np.linalg.norm(x, axis=1))))}")


def test_projection_on_a_direction_of_ones_own(page: Any, stack: Stack, capture: str, tmp_path: Path) -> None:
    direction = np.random.default_rng(3).standard_normal(WIDTH).astype(np.float32)
    np.save(tmp_path / "direction.npy", direction)
    area = look(page, stack, capture)
    area.locator("canvas").click(position=cell_of(page, 1, 6))
    page.get_by_label("Measure").select_option("projection")
    page.get_by_role("button", name="Direction").set_input_files(tmp_path / "direction.npy")
    x = rows(0, "resid_post", 1, [6], "bfloat16")[0].astype(np.float64)
    expect(told(page)).to_contain_text(f"projection {shown(float(x @ direction / np.linalg.norm(direction)))}")
    np.save(tmp_path / "short.npy", direction[:5])
    page.get_by_role("button", name="Direction").set_input_files(tmp_path / "short.npy")
    expect(page.get_by_role("alert")).to_contain_text(f"rows of {WIDTH} numbers")


def test_missing_rows_are_hatched_and_named(page: Any, stack: Stack, holed: str) -> None:
    area = look(page, stack, holed)
    cell_of(page, 0, 0)
    assert cell(page, 1, 9)["colours"] > 1 and cell(page, 1, 2)["colours"] > 1
    assert cell(page, 0, 9)["colours"] == 1 and cell(page, 1, 12)["colours"] == 1
    expect(page.locator(".legend")).to_contain_text("dropped under pressure")
    area.locator("canvas").click(position=cell_of(page, 1, 9))
    expect(told(page)).to_contain_text("layer 1, missing: dropped under pressure")
    expect(page.get_by_role("region", name="row")).to_contain_text("No row here: dropped under pressure")
    page.get_by_text("Values as a table").click()
    table = page.get_by_role("region", name="values as a table")
    expect(table.locator("td.hatch").first).to_have_text("prefix_cached")
    assert table.get_by_text("0", exact=True).count() == 2  # the layer and the position: no value is a zero


def test_compares_two_captures(page: Any, stack: Stack, capture: str, holed: str) -> None:
    look(page, stack, capture)
    page.get_by_role("button", name="compare with").click()
    expect(page.locator(".map")).to_have_count(2)
    expect(page.locator(".tok.differs")).to_have_count(3)  # fox, cat
    assert cell(page, 0, 5) == {**cell(page, 0, 5, 1), "columns": P + G - 1}  # position below position
    page.get_by_label("Comparison").select_option("difference")
    expect(page.locator(".map")).to_have_count(1)
    area = page.locator("#map-0")
    area.focus()
    area.press("Home")
    expect(told(page)).to_contain_text("missing: taken from the prefix cache, not computed (in the other capture)")
    for _ in range(5):
        area.press("ArrowRight")
    expect(told(page)).to_contain_text("difference of norm 0")
    area.press("End")
    expect(told(page)).to_contain_text("missing: past the end of the sequence")
    page.get_by_label("Comparison").select_option("distance")
    expect(page.locator(".legend-name")).to_have_text("distance")
    area.press("ArrowLeft")
    expect(told(page)).to_contain_text("missing: past the end of the sequence")
    page.get_by_role("button", name="stop comparing").click()
    expect(page.locator(".against")).to_be_hidden()


def test_a_long_capture_is_shown_part_by_part(page: Any, stack: Stack) -> None:
    long = made(stack, "x" * 700, capture={"sites": ["resid_post"], "codec": "raw"})
    area = look(page, stack, long)
    expect(page.locator(".pager")).to_contain_text("positions 0–511 of 707")
    page.get_by_role("button", name="later positions").click()
    expect(page.locator(".pager")).to_contain_text("positions 512–706 of 707")
    expect(page.locator("#map-0 canvas[data-columns='195']")).to_be_visible()
    area.focus()
    expect(told(page)).to_have_text(f"token x, position 512, layer 0, norm {shown(norm(0, 512))}")


def test_a_name_of_several_captures_offers_each(page: Any, stack: Stack) -> None:
    both = stack.complete("two", n=2, max_tokens=3, capture={"sites": ["resid_post"]}).json()["capture"]
    page.goto(f"{stack.url}/#{both['id']}")
    page.get_by_role("link", name=both["ids"][1]).click()
    expect(page.locator(".head .id")).to_have_text(both["ids"][1])


@contextmanager
def generating(stack: Stack, tokens: int, **capture: Any) -> Iterator[None]:
    """A capture that is slowly generated meanwhile."""
    thread = threading.Thread(target=lambda: stack.complete(
        "Slowly", max_tokens=tokens, stream=True, play={"delay_s": 0.2, "live": True}, capture=capture))
    thread.start()
    try:
        yield
    finally:
        thread.join()


@dataclass
class Asked:
    """What a page asks for."""

    page: Any
    urls: list[str] = field(default_factory=list)
    streams: set[Any] = field(default_factory=set)  # that are open now
    streams_max: int = 0

    def __post_init__(self) -> None:
        self.page.on("request", self._begun)
        for kind in ("requestfinished", "requestfailed"):
            self.page.on(kind, lambda request: self.streams.discard(request))

    def _begun(self, request: Any) -> None:
        self.urls.append(request.url)
        if "/events" in request.url or "/live" in request.url:
            self.streams.add(request)
            self.streams_max = max(self.streams_max, len(self.streams))


@contextmanager
def watching(page: Any, stack: Stack, tokens: int, **capture: Any) -> Iterator[Asked]:
    """The page on a capture while it is slowly generated."""
    asked = Asked(page)
    with generating(stack, tokens, **capture):
        page.goto(stack.url)
        page.locator(".captures li", has_text="running").first.click()
        yield asked


def test_watches_a_capture_grow(page: Any, stack: Stack) -> None:
    with watching(page, stack, 50, sites=["resid_post"], id="01HZZZZZZZZZZZZZZZZZZZZZZZ", codec="raw") as asked:
        page.locator("#map-0 canvas[data-columns]").wait_for()
        expect(page.locator(".live")).to_be_visible()
        seen = set()
        while page.locator(".live").is_visible():
            seen.add(int(page.locator("#map-0 canvas").get_attribute("data-columns")))
            page.wait_for_timeout(100)
        assert len(seen) >= 3 and min(seen) < 50, seen
        expect(page.locator(f"#map-0 canvas[data-columns='{6 + 49}']")).to_be_visible()
        expect(page.locator(".head")).to_contain_text("220 of 220")
        assert sum("/events" in url for url in asked.urls) == 1  # told, not polled
        assert all(cell(page, layer, position)["colours"] == 1 for layer in (0, 3) for position in range(55))


def test_makes_a_capture(page: Any, stack: Stack) -> None:
    page.goto(stack.url)
    page.get_by_text("New capture").click()
    page.get_by_label("Prompt").fill("Made here")
    page.get_by_label("attn_out").check()
    page.get_by_label("Tokens to generate").fill("5")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator(".generated")).to_have_text("abcde")
    expect(page.locator(".head")).to_contain_text("9 + 5")
    page.get_by_label("Site").select_option("attn_out")
    area = page.locator("#map-0")
    area.focus()
    expect(told(page)).to_have_text(f"token M, position 0, layer 0, norm {shown(norm(0, 0, 'attn_out'))}")


# ── probes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def probed(stack: Stack) -> str:
    return made(stack, PROMPT, play={"drop": ["probe.tone", [2], 9, 11], "nan": [7]},
                capture={"sites": ["resid_post"], "probe": ["tone"], "codec": "raw"})


def scores(positions: list[int]) -> Any:
    return rows(0, "probe.tone", 2, positions, "bfloat16")


def look_at_scores(page: Any, stack: Stack, capture: str) -> Any:
    """Opens a capture and chooses its probe; the text in colours."""
    page.goto(f"{stack.url}/#{capture}")
    page.get_by_label("Site").select_option("probe.tone")
    text = page.locator("#text-0")
    text.wait_for()
    return text


def chosen_score(page: Any) -> Any:
    return page.get_by_role("combobox", name=re.compile("^Score"))


def tint(word: Any) -> list[int]:
    """Red, green and blue behind a token."""
    return [int(part) for part in word.evaluate("e => getComputedStyle(e).backgroundColor").strip("rgb()").split(",")]


def test_a_probes_scores_are_a_map_with_signs(page: Any, stack: Stack, probed: str) -> None:
    look_at_scores(page, stack, probed)
    low, high = scores([at for at in range(P + G - 1) if at not in (7, 9, 10)]).flatten()[
        np.argsort(scores([at for at in range(P + G - 1) if at not in (7, 9, 10)]).flatten())[[0, -1]]]
    expect(page.locator(".legend")).to_contain_text(f"scores of tonefrom {shown(low)} to {shown(high)}")
    expect(page.locator(".legend")).to_contain_text("dropped under pressure")
    canvas = page.locator("#map-0 canvas[data-columns]")
    for score, name, at in ((0, "glad", 5), (1, "sad", 2)):  # the first on top
        where = cell(page, 1 - score, at, rows=2)
        assert where["colours"] == 1
        canvas.hover(position={"x": where["x"], "y": where["y"]})
        tip = page.locator(".tip")
        expect(tip.locator("b")).to_have_text(PROMPT[at])
        expect(tip).to_contain_text(f"position {at}{name} {shown(scores([at])[0][score])}")
    assert cell(page, 0, 9, rows=2)["colours"] > 1 and cell(page, 1, 7, rows=2)["colours"] > 1


def test_the_text_is_in_the_colours_of_the_chosen_score(page: Any, stack: Stack, probed: str) -> None:
    text = look_at_scores(page, stack, probed)
    words = text.locator(".word")
    expect(words).to_have_text(list(PROMPT) + list("abcdefgh")[:G - 1])
    for score, name in enumerate(("glad", "sad")):
        chosen_score(page).select_option(name)
        expect(text).to_have_attribute("aria-label", f"tone, scores × tokens, coloured by {name}")
        for at in (1, 2, 5, 6, P + 2):
            value, (red, _, blue) = scores([at])[0][score], tint(words.nth(at))
            assert abs(value) < 0.2 or (red > blue) == (value > 0), (at, value, red, blue)
    for at in (7, 9, 10):
        assert "hatch" in words.nth(at).get_attribute("class")
    words.nth(5).hover()
    expect(page.locator(".readout")).to_have_text(f"{PROMPT[5]} position 5 · sad {shown(scores([5])[0][1])}")
    words.nth(9).hover()
    expect(page.locator(".readout")).to_contain_text("sad missing: dropped under pressure")
    words.nth(7).hover()
    expect(page.locator(".readout")).to_contain_text("sad no number")


def test_the_keyboard_goes_through_the_text_and_to_all_scores_of_a_token(page: Any, stack: Stack, probed: str) -> None:
    text = look_at_scores(page, stack, probed)
    text.focus()
    expect(told(page)).to_have_text(f"token T, position 0, glad {shown(scores([0])[0][0])}")
    for key in ("End", "PageUp", "ArrowLeft"):
        text.press(key)
    at = P + G - 2 - 11
    value = scores([at])[0]
    expect(told(page)).to_have_text(f"token {PROMPT[at]}, position {at}, glad {shown(value[0])}")
    expect(page.locator(".readout")).to_contain_text(f"position {at} · glad {shown(value[0])}")
    area = page.locator("#map-0")
    area.focus()
    area.press("ArrowDown")
    expect(told(page)).to_have_text(f"token {PROMPT[at]}, position {at}, sad {shown(value[1])}")
    expect(chosen_score(page)).to_have_value("1")  # the text follows
    area.press("Enter")
    panel = page.get_by_role("region", name="row")
    expect(panel).to_contain_text(f"tone, position {at}")
    for name, number in zip(("glad", "sad"), value, strict=True):
        expect(panel.locator("tr", has_text=name)).to_contain_text(shown(number))
    page.get_by_text("Values as a table").click()
    table = page.get_by_role("region", name="values as a table")
    expect(table.locator("tbody tr").first).to_contain_text(f"glad{shown(scores([0])[0][0])}")


def test_the_highest_tokens_are_listed_and_lead_to_their_place(page: Any, stack: Stack) -> None:
    long = made(stack, "x" * 700 + "y" * 6, capture={"probe": ["tone"]})
    look_at_scores(page, stack, long)
    expect(page.locator(".pager")).to_contain_text("positions 0–511 of 713")
    letters, glad = "x" * 700 + "y" * 6 + "abcdefg", scores(list(range(713)))[:, 0]
    order = np.argsort(-glad)[:10].tolist()
    assert any(at >= 512 for at in order), "one of them is to be on the other page"
    expect(page.locator(".highest li .soft")).to_have_text([str(at) for at in order])
    expect(page.locator(".highest li b")).to_have_text([letters[at] for at in order])
    there = next(at for at in order if at >= 512)
    page.get_by_role("button", name=f"position {there}, glad {shown(glad[there])}").press("Enter")
    expect(page.locator(".pager")).to_contain_text("positions 512–712 of 713")
    expect(told(page)).to_have_text(f"token {letters[there]}, position {there}, glad {shown(glad[there])}")


def test_scores_of_two_captures_are_watched_as_they_come_over_one_stream(page: Any, stack: Stack) -> None:
    first, second = "01HYYYYYYYYYYYYYYYYYYYYYYY", "01HXXXXXXXXXXXXXXXXXXXXXXX"
    with generating(stack, 18, probe=["tone"], id=second), watching(page, stack, 26, probe=["tone"], id=first) as asked:
        page.goto(f"{stack.url}/#{first}~{second}")
        text, other = page.locator("#text-0"), page.locator("#text-1")
        expect(text.locator(".word").nth(8)).to_have_text("c")
        expect(other.locator(".word").nth(8)).to_have_text("c")
        texts = list[tuple[str, str]]()
        while page.locator(".live").is_visible():
            texts.append((text.inner_text().replace("\n", ""), other.inner_text().replace("\n", "")))
            page.wait_for_timeout(150)
        mine, theirs = (set(each) for each in zip(*texts, strict=True))
        assert len(mine) >= 5 and min(map(len, mine)) < 25 and len(theirs) >= 3, texts
        expect(text.locator(".word")).to_have_text(list("Slowlyabcdefghijklmnopqrstuvwxy"))
        expect(other.locator(".word")).to_have_text(list("Slowlyabcdefghijklmnopq"))
        assert asked.streams_max == 1 and not asked.streams  # a browser has six connections
        # Told, not asked for again and again: with what is watched a stream begins anew.
        assert sum("/events" in url for url in asked.urls) <= 5
        assert sum("/activations?" in url for url in asked.urls) == 2  # what is stored, once it is
        assert all(cell(page, score, at, rows=2)["colours"] == 1 for score in (0, 1) for at in range(31))
        text.focus()
        text.press("End")
        expect(told(page)).to_have_text(f"token y, position 30, glad {shown(scores([30])[0][0])}")


def test_what_is_deleted_while_it_is_watched_is_said_to_be_gone(page: Any, stack: Stack) -> None:
    capture = "01HWWWWWWWWWWWWWWWWWWWWWWW"
    with watching(page, stack, 10, probe=["tone"], id=capture) as asked:
        expect(page.locator("#text-0 .word").nth(7)).to_be_visible()
        assert stack.http.delete(f"/v1/captures/{capture}").status_code == 204
        expect(page.get_by_role("alert")).to_contain_text("no capture")
        before = len(asked.urls)
        page.wait_for_timeout(1000)
        assert not any(capture in url for url in asked.urls[before:]), "it is asked for no more"


def test_two_texts_are_held_against_each_other(page: Any, stack: Stack, probed: str, capture: str) -> None:
    other = made(stack, PROMPT.replace("fox", "cat"), capture={"probe": ["tone"]})
    page.goto(f"{stack.url}/#{probed}~{other}")
    page.get_by_label("Site").select_option("probe.tone")
    expect(page.locator("#text-1 .word.differs")).to_have_text(["c", "a", "t"])
    page.get_by_label("Comparison").select_option("difference")
    page.locator("#text-0").focus()
    expect(told(page)).to_have_text("token T, position 0, difference of glad 0")
    page.goto(f"{stack.url}/#{probed}~{capture}")
    page.get_by_label("Site").select_option("probe.tone")
    expect(page.get_by_role("alert")).to_contain_text("has no scores of this probe")
    expect(page.locator("#text-0")).to_be_visible()


def test_scores_alone_are_asked_for_from_the_page(page: Any, stack: Stack) -> None:
    page.goto(stack.url)
    page.get_by_text("New capture").click()
    page.get_by_label("Tokens to generate").fill("5")
    expect(page.get_by_label("tone")).to_be_checked()
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#text-0 .word").last).to_have_text("d")
    expect(page.get_by_label("Site").locator("option")).to_have_text(["probe.tone"])


def test_every_colour_can_be_read_on_and_a_sigmoid_has_but_one_side(page: Any, stack: Stack) -> None:
    page.goto(stack.url)
    found = page.evaluate("""async () => {
        const { scaleOf } = await import("/page/colours.js");
        const map = { layers: [0], values: [[-1, 0, 0.5, 1]] };
        const told = (how) => {
            const scale = scaleOf([map], how);
            return Array.from({ length: 201 }, (_, i) => [scale.colour(i / 100 - 1, 0), scale.ink(i / 100 - 1, 0)]);
        };
        return [told({ mode: "linear", signed: true, fixed: [-1, 1] }),
                told({ mode: "linear", signed: true, rising: true, fixed: [0, 1] })];
    }""")

    def luminance(colour: str) -> float:
        parts = np.array([int(c) for c in colour[4:-1].split(",")] if colour[0] == "r" else
                         [255 * (colour == "#fff")] * 3) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    for colour, ink in found[0] + found[1]:
        dark, light = sorted((luminance(colour), luminance(ink)))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (colour, ink)
    signed, rising = ([colour for colour, _ in scale] for scale in found)
    assert signed[0] == "rgb(33,102,172)" and signed[200] == rising[200] == "rgb(178,24,43)"
    assert signed[100] == "rgb(247,247,246)" and rising[0] == rising[100] == "rgb(247,247,247)"


# ── sweeps of activation patching ───────────────────────────────────────────────────────────────────────────────────


def swept(positions: list[int], tokens: int, sites: tuple[str, ...] = ("resid_post", "attn_out")) -> PatchSweep:
    """A sweep of layers 1 and 3, the second site without the first of them."""
    values = np.random.default_rng(4).normal(size=(len(sites), 2, len(positions)))
    values[1:, 0] = np.nan
    clean = list(range(100, 100 + tokens))
    return PatchSweep(values, values * 4 + 2, list(sites), [1, 3], positions, clean, [7, *clean[1:]], 6.0, 2.0,
                      "logit of 17 less that of 5")


def open_sweep(page: Any, path: Path) -> None:
    """Chooses a file as a person does."""
    page.get_by_text("Patching sweep").click()
    page.get_by_label("File of a sweep").set_input_files(path)


def test_a_sweep_is_shown_as_the_heat_maps_of_its_sites(page: Any, stack: Stack, capture: str, tmp_path: Path) -> None:
    sweep = swept([0, 1, 2, 4], 6)
    sweep.to_json(tmp_path / "sweep.json", words=["The", " cat", "\n", "on"])
    asked = Asked(page)
    look(page, stack, capture)
    cell_of(page, 0, 0)
    open_sweep(page, tmp_path / "sweep.json")
    head = page.locator(".head")
    expect(head).to_contain_text("sweep.json")
    expect(head).to_contain_text("logit of 17 less that of 5")
    expect(head).to_contain_text("clean prompt6corrupted prompt2tokens6")
    expect(page.locator(".view")).to_contain_text("The prompts differ at position 0 The (#7, clean #100).")
    expect(page.locator(".map figcaption")).to_have_text(["resid_post", "attn_out"])
    most = shown(float(np.nanmax(np.abs(sweep.values))))
    expect(page.locator(".legend")).to_contain_text(f"-{most}{most}given back")
    expect(page.locator(".legend")).to_contain_text("not asked for")  # position 3
    where = cell(page, 1, 1, rows=2)
    page.locator("#map-0 canvas").hover(position={"x": where["x"], "y": where["y"]})
    expect(page.locator(".tip")).to_have_text(f"·catposition 1 · layer 3gives back {shown(sweep.values[0, 1, 1])}")
    for n, row, column, colours in ((0, 0, 0, 1), (0, 1, 4, 1), (0, 1, 3, 2), (1, 0, 0, 2), (1, 1, 2, 1)):
        assert (cell(page, row, column, n, rows=2)["colours"] > 1) == (colours > 1), (n, row, column)
    assert not any(sweep_word in url for url in asked.urls for sweep_word in ("sweep.json", "blob:")), "it stays here"
    page.get_by_role("button", name="Close the sweep").click()
    expect(page.locator(".head .id")).to_have_text(capture)  # what was open before


def test_the_colours_of_a_sweep_have_white_for_nothing_given_back(page: Any, stack: Stack, tmp_path: Path) -> None:
    sweep = swept([0, 1, 2], 3, ("resid_post",))
    sweep.values[0] = [[0, 1, -1], [0.5, -0.5, 0]]
    sweep.to_json(tmp_path / "sweep.json")
    page.goto(stack.url)
    open_sweep(page, tmp_path / "sweep.json")
    page.locator("#map-0 canvas[data-cell]").wait_for()
    colours = page.evaluate("""() => {
        const canvas = document.querySelector("#map-0 canvas"), ratio = canvas.width / parseFloat(canvas.style.width);
        const [width, height] = canvas.dataset.cell.split("x").map(Number);
        return [0, 1, 2].map((column) => [...canvas.getContext("2d").getImageData(
            (column + 0.5) * width * ratio, 1.5 * height * ratio, 1, 1).data].slice(0, 3));
    }""")
    assert colours == [[247, 247, 246], [178, 24, 43], [33, 102, 172]]


def test_the_keyboard_goes_through_a_sweep(page: Any, stack: Stack, tmp_path: Path) -> None:
    sweep = swept([0, 1, 2, 4], 6)
    sweep.to_json(tmp_path / "sweep.json")
    page.goto(stack.url)
    open_sweep(page, tmp_path / "sweep.json")
    area = page.locator("#map-0")
    area.focus()
    expect(told(page)).to_have_text(f"token #7, position 0, layer 1, gives back {shown(sweep.values[0, 0, 0])}")
    for key in ("ArrowUp", "End", "Enter"):  # there is no row to open
        area.press(key)
    expect(told(page)).to_have_text(f"token #104, position 4, layer 3, gives back {shown(sweep.values[0, 1, 3])}")
    area.press("ArrowLeft")
    expect(told(page)).to_have_text("token #103, position 3, layer 3, missing: not asked for")
    expect(page.locator("#map-0-how")).not_to_contain_text("Enter")
    page.locator("#map-1").focus()
    expect(told(page, 1)).to_have_text("token #7, position 0, layer 1, no number")
    expect(told(page)).to_be_empty()  # one of them speaks
    page.get_by_text("Values as a table").click()
    table = page.get_by_role("region", name="values as a table: resid_post")
    expect(table.locator("tbody tr").first).to_have_text("".join(
        ["3", *(shown(each) for each in sweep.values[0, 1, :3]), "not_asked", shown(sweep.values[0, 1, 3])]))


def test_a_sweep_of_a_long_prompt_is_shown_part_by_part(page: Any, stack: Stack, tmp_path: Path) -> None:
    sweep = swept([600, 601, 1100], 1200)
    sweep.to_json(tmp_path / "sweep.json")
    page.goto(stack.url)
    open_sweep(page, tmp_path / "sweep.json")
    expect(page.locator(".pager")).to_contain_text("positions 512–1023 of 1101")
    page.get_by_role("button", name="later positions").click()
    expect(page.locator("#map-0 canvas[data-columns='77']")).to_be_visible()
    area = page.locator("#map-0")
    area.focus()
    area.press("End")
    expect(told(page)).to_have_text(f"token #1200, position 1100, layer 1, gives back {shown(sweep.values[0, 0, 2])}")


TRY = "choose the file that sweep.to_json(path) has written"


@pytest.mark.parametrize(("change", "says"), [
    (lambda text: text[:-9], f"this is no JSON: {TRY}"),
    (lambda text: '{"sweep": {"model": "m"}}\n{"cell": ["z", 0, 0], "metric": 1}\n',
     f"this is the file that a sweep goes on from (results=…): {TRY}"),
    (lambda text: "[]", f"sites: a list of names is needed there; {TRY}"),
    (lambda text: text.replace('"layers": [1, 3]', '"layers": [3, 1]'), "layers: a list of rising numbers from 0 is"),
    (lambda text: text.replace('"positions": [0, 1]', '"positions": [0, 3]'),
     "positions: a list of rising numbers below the 3 tokens of the prompts is"),
    (lambda text: text.replace('"values": [[[', '"values": [[[1, '), "values: numbers, or null, of 1 sites × 2 layers"),
    (lambda text: text.replace('"corrupted_metric": 2.0', '"corrupted_metric": null'), "corrupted_metric: a number is"),
    (lambda text: text[:-1] + ', "words": ["one"]}', "words: left out, or 2 texts is"),
    (lambda text: text[:-1] + ', "words": "' + "x" * 2**26 + '"}', "the file has more than 64 MiB"),
], ids=["cut off", "results", "a list", "layers", "positions", "values", "metric", "words", "too large"])
def test_a_file_that_is_no_sweep_is_named_with_what_is_wrong(page: Any, stack: Stack, tmp_path: Path, change: Any,
                                                             says: str) -> None:
    sweep = swept([0, 1], 3, ("resid_post",))
    (tmp_path / "some.json").write_text(changed := change(sweep.to_json()))
    assert changed != sweep.to_json()
    page.goto(stack.url)
    open_sweep(page, tmp_path / "some.json")
    expect(page.get_by_role("alert")).to_contain_text(f"some.json: {says}")
    expect(page.locator(".map")).to_have_count(0)
    sweep.to_json(tmp_path / "some.json")  # the same file, mended
    page.get_by_label("File of a sweep").set_input_files(tmp_path / "some.json")
    expect(page.locator(".map")).to_have_count(1)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_sweep_makes_room_for_a_capture(page: Any, stack: Stack, capture: str, tmp_path: Path) -> None:
    swept([0, 1], 3).to_json(tmp_path / "sweep.json")
    look(page, stack, capture)
    open_sweep(page, tmp_path / "sweep.json")
    expect(page.get_by_role("region", name="patching sweep")).to_be_visible()
    page.get_by_role("searchbox").fill("animal=fox")
    page.get_by_role("searchbox").press("Enter")  # the one that was open: its address stays
    expect(page.locator(".head .id")).to_have_text(capture)
    page.get_by_label("File of a sweep").set_input_files(tmp_path / "sweep.json")
    page.locator(".brand").click()
    expect(page.locator(".welcome")).to_be_visible()


# ── keys, ports, everybody ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_key_is_asked_for_kept_for_the_tab_and_forgotten(page: Any, stack: Stack, tmp_path: Path) -> None:
    from api.auth.keys import make_key

    secret = make_key(tmp_path / "keys.json", "someone")
    process = Process(["api", "--store", str(stack.store), "--endpoint", stack.endpoint, "--port", "0", "--keys",
                       str(tmp_path / "keys.json"), "--upstream", stack.upstream_url], tmp_path / "api.log")
    try:
        page.goto(process.wait_ready())
        expect(page.get_by_text("A key is needed")).to_be_visible()
        page.get_by_label("API key").fill("tap_wrong")
        page.get_by_role("button", name="Use").click()
        expect(page.get_by_text("this key is refused")).to_be_visible()
        page.get_by_role("button", name="Forget the key").click()
        page.get_by_label("API key").fill(secret)
        page.get_by_role("button", name="Use").click()
        expect(page.get_by_text("No captures yet.")).to_be_visible()  # those of others are not there
        page.reload()
        expect(page.get_by_text("No captures yet.")).to_be_visible()
        assert secret not in json.dumps(page.context.storage_state())  # neither cookies nor local storage
        page.get_by_role("button", name="Forget the key").click()
        expect(page.get_by_text("A key is needed")).to_be_visible()
    finally:
        process.stop()


def test_the_same_page_is_on_the_model_servers_own_port(page: Any, tmp_path: Path) -> None:
    with server(tmp_path, "--key", "the-only-one", key="the-only-one") as stack:
        mine = made(stack, PROMPT, capture={"sites": ["resid_post"], "codec": "raw"})
        page.goto(f"{stack.url}/captures")
        assert page.url == f"{stack.url}/captures/"
        expect(page.get_by_text("A key is needed")).to_be_visible()
        page.get_by_label("API key").fill("the-only-one")
        page.get_by_role("button", name="Use").click()
        page.locator(".captures li").first.click()
        area = page.locator("#map-0")
        area.focus()
        expect(told(page)).to_have_text(f"token T, position 0, layer 0, norm {shown(norm(0, 0))}")
        assert page.url == f"{stack.url}/captures/#{mine}"
        page.get_by_text("New capture").click()
        page.get_by_label("Tokens to generate").fill("5")
        page.get_by_role("button", name="Generate").click()
        expect(page.locator("#text-0 .word").last).to_have_text("d")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("what", ["start", "capture", "pair", "probe", "sweep"])
def test_accessible(page: Any, stack: Stack, capture: str, holed: str, probed: str, what: str, scheme: str,
                    tmp_path: Path) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="`make page-test` installs it")
    # The checker is put in by the test: the page itself would not let it.
    page.close()
    context = page.context.browser.new_context(bypass_csp=True, color_scheme=scheme, reduced_motion="reduce")
    tab = context.new_page()
    try:
        tab.goto(f"{stack.url}/#{dict(capture=capture, pair=f'{capture}~{holed}', probe=probed).get(what, '')}")
        tab.locator(".captures li").first.wait_for()
        if what == "probe":
            tab.get_by_label("Site").select_option("probe.tone")
            tab.locator("#text-0").focus()
            tab.locator("#map-0").press("Enter")
            tab.locator(".scores").wait_for()
            tab.get_by_text("Values as a table").click()
        elif what == "sweep":
            swept([0, 1, 2, 4], 6).to_json(tmp_path / "sweep.json")
            (tmp_path / "other.json").write_text("")
            open_sweep(tab, tmp_path / "sweep.json")
            tab.locator("#map-0").focus()
            tab.get_by_text("Values as a table").click()
            tab.get_by_label("File of a sweep").set_input_files(tmp_path / "other.json")
            tab.get_by_role("alert").wait_for()
        elif what != "start":
            tab.locator("#map-0 canvas").click(position=cell_of(tab, 1, 6))
            tab.locator(".bars").wait_for()
            tab.get_by_text("Values as a table").click()
        found = axe.Axe().run(tab).response["violations"]
        assert [(each["id"], [node["html"][:150] for node in each["nodes"]][:3]) for each in found] == []
    finally:
        context.close()


def test_of_several_engines_it_tells_which_are_up(browser: Any, tmp_path: Path) -> None:
    with stack_in(tmp_path) as stack:
        stack.start_writer()
        stack.processes["writer"].wait_ready()
        for name in "ab":
            stack.start_engine(name)
        stack.start_gateway()
        while not all(each["upstream"] == "ok" for each in stack.http.get("/readyz").json()["engines"].values()):
            time.sleep(0.1)
        stack.http.headers["x-vllm-tap-engine"] = "b"
        made(stack, PROMPT, capture={"sites": ["resid_post"], "tags": {"animal": "fox"}})
        stack.processes["a"].kill()
        while stack.http.get("/readyz").json()["engines"]["a"]["upstream"] == "ok":
            time.sleep(0.1)
        tab = browser.new_page()
        tab.goto(stack.url)
        engines = tab.get_by_role("list", name="engines").get_by_role("listitem")
        expect(engines).to_have_text(["a (away)", "b"])
        assert "no answer" in engines.first.get_attribute("title")
        tab.locator(".captures li").first.click()
        expect(tab.locator(".head dl")).to_contain_text("engineb")
        tab.close()


def test_nothing_moves_for_who_wants_it_still_and_a_narrow_window_does_not_scroll_sideways(
        page: Any, stack: Stack, capture: str) -> None:
    page.emulate_media(reduced_motion="reduce")
    page.set_viewport_size({"width": 400, "height": 800})
    look(page, stack, capture)
    cell_of(page, 0, 0)
    assert page.evaluate("document.getAnimations().length") == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
