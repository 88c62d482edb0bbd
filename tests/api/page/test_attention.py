"""Attention on the page: query against key, the heaviest keys, entropy by head; the numbers are the store's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.page.conftest import CHROMIUM, NO_CHROMIUM
from tests.support.engines.attending import PROMPT, WHOLE, Attending, attending
from vllm_tap import Attention

playwright = pytest.importorskip("playwright.sync_api", reason="the page was NOT tested: `make page-test` installs "
                                                               "playwright and says how to get a browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
expect = playwright.expect
EXPECTED = ("the server responded with a status of 503",)  # no model is served, so nothing can be generated


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attending]:
    with attending(tmp_path_factory.mktemp("attention")) as engine:
        yield engine


@pytest.fixture(scope="module")
def capture(engine: Attending) -> str:
    return engine.capture(WHOLE, told=True)


def opened(page: Any, engine: Attending, ref: str) -> Any:
    """The attention of a capture; its first map."""
    page.goto(f"{engine.stack.url}/#{ref}")
    page.get_by_label("Site").select_option("attention")
    return page.locator("#map-0")


def shown(value: float) -> str:
    """A number as the page has it."""
    return f"{value:.4g}"


def seen(engine: Attending, ref: str, layer: int, **asked: Any) -> Attention:
    return engine.store[ref].attention(layer, **asked)


def test_the_heaviest_keys_of_a_query_are_the_stores(page: Any, engine: Attending, capture: str) -> None:
    area, found = opened(page, engine, capture), seen(engine, capture, 0, top=4, heads=[0])
    page.get_by_label("Keys kept").select_option("4")
    area.focus()
    told = page.locator("#map-0-told")
    expect(told).to_contain_text(f"from query {PROMPT - 1} ")  # the lowest row
    for key in ("ArrowUp", "ArrowUp", "Home"):
        area.press(key)
    at = PROMPT - 3
    keys, weights = found.keys[0, at].tolist(), found.weights[0, at].tolist()
    for key in range(PROMPT):
        expect(told).to_contain_text(f"position {key}, from query {at} ")
        expect(told).to_contain_text(
            f": weight {shown(weights[keys.index(key)])}" if key in keys else
            "a later token, which it does not see" if key > at else
            f"not among its 4 heaviest keys: at most {shown(weights[-1])}")
        area.press("ArrowRight")
    lines = page.get_by_role("region", name="heaviest keys").locator("tbody tr")
    expect(lines).to_have_count(4)
    for line, key, weight in zip(lines.all(), keys, weights, strict=True):
        expect(line).to_contain_text(f"{key}{shown(weight)}")


def test_only_what_was_kept_has_a_colour_and_what_is_missing_is_hatched(page: Any, engine: Attending) -> None:
    holed = engine.capture({"q_rot": [at for at in range(PROMPT) if at != 5], "k_rot": WHOLE["k_rot"]}, told=True)
    area, found = opened(page, engine, holed), seen(engine, holed, 0, top=8, heads=[0], allow_missing=True)
    area.locator("canvas[data-cell]").wait_for()
    drawn = page.evaluate("""(n) => {
        const canvas = document.querySelector("#map-0 canvas[data-cell]");
        const ratio = canvas.width / parseFloat(canvas.style.width);
        const [width, height] = canvas.dataset.cell.split("x").map(Number);
        const pen = canvas.getContext("2d");
        return Array.from({length: n}, (_, query) => Array.from({length: n}, (_, key) => {
            const inside = [key * width + 1, query * height + 1, width - 3, height - 3].map((each) => each * ratio);
            const data = pen.getImageData(...inside).data;
            const colours = new Set();
            for (let i = 0; i < data.length; i += 4) colours.add(data.slice(i, i + 4).join());
            return colours.size > 1 ? "hatched" : data[3] === 0 ? "blank" : "coloured";
        }));
    }""", PROMPT)
    for query in range(PROMPT):
        kept = set() if query == 5 else set(found.keys[0, found.positions.tolist().index(query)].tolist())
        for key in range(PROMPT):
            due = "hatched" if query == 5 else "coloured" if key in kept else "blank"
            assert drawn[query][key] == due, (query, key)
    expect(page.locator(".legend").first).to_contain_text("dropped under pressure")
    page.get_by_text("Weights as a table").click()
    table = page.get_by_role("region", name="values as a table: head 0")
    expect(table.locator("td.hatch").first).to_have_text("dropped")


def test_entropy_chooses_a_head_and_several_stand_side_by_side(page: Any, engine: Attending, capture: str) -> None:
    opened(page, engine, capture)
    found = seen(engine, capture, 0)
    spread = page.locator("#spread")
    spread.focus()
    told = page.locator("#spread-told")
    for key in ("ArrowUp", "End"):  # head 3 is the lowest
        spread.press(key)
    expect(told).to_contain_text(f"position {PROMPT - 1}, head 2: entropy {shown(float(found.entropy[2, -1]))}")
    spread.press("Enter")
    expect(page.locator(".map figcaption").first).to_have_text("layer 0, head 2: queries × keys")
    heads = page.get_by_label("Heads")
    heads.fill("0, 3")
    heads.press("Enter")
    expect(page.locator(".map figcaption")).to_have_count(3)
    expect(page.locator(".map figcaption").nth(1)).to_have_text("layer 0, head 3: queries × keys")
    page.locator("#map-1").focus()
    page.locator("#map-1").press("Home")
    at = PROMPT - 1
    keys, weights = found.keys[3, at].tolist(), found.weights[3, at].tolist()
    expect(page.locator("#map-1-told")).to_contain_text(
        f": weight {shown(weights[keys.index(0)])}" if 0 in keys else "not among its 8 heaviest keys")
    heads.fill("4")
    heads.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("1 to 4 numbers below 4")


def test_a_layer_with_sinks_and_an_engine_that_told_nothing(page: Any, engine: Attending, capture: str) -> None:
    opened(page, engine, capture)
    page.get_by_role("combobox", name="Layer").select_option("1")
    expect(page.locator("#map-0-title")).to_have_text("layer 1, head 0: queries × keys")
    area = page.locator("#map-0")
    area.focus()
    area.press("Home")
    expect(page.locator("#map-0-told")).to_contain_text("outside of the window, not seen")
    page.get_by_role("combobox", name="Layer").select_option("3")
    expect(page.get_by_role("alert")).to_contain_text("attention sinks, which no rule says")
    expect(page.locator(".map")).to_have_count(0)
    opened(page, engine, engine.capture(WHOLE))
    expect(page.get_by_role("alert")).to_contain_text("did not tell how its attention weighs keys")


def test_a_capture_without_keys_has_no_attention(page: Any, engine: Attending) -> None:
    page.goto(f"{engine.stack.url}/#{engine.capture({'q_rot': range(PROMPT)})}")
    expect(page.get_by_label("Site").locator("option")).to_have_text(["q_rot"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessible(browser: Any, engine: Attending, capture: str, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="`make page-test` installs it")
    context = browser.new_context(bypass_csp=True, color_scheme=scheme, reduced_motion="reduce")
    tab = context.new_page()
    try:
        opened(tab, engine, capture)
        tab.locator("#map-0").focus()
        tab.locator("#heaviest").wait_for()
        tab.get_by_text("Weights as a table").click()
        tab.get_by_text("Entropy as a table").click()
        found = axe.Axe().run(tab).response["violations"]
        assert [(each["id"], [node["html"][:150] for node in each["nodes"]][:3]) for each in found] == []
    finally:
        context.close()
