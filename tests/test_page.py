"""The page in a real browser: what a person sees and does, and that the numbers are the true ones.

`make page-test` runs it; without playwright and a Chromium it is skipped, and says so.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.api_stack import Process, Stack, running
from tests.engine_player import WIDTH, rows

playwright = pytest.importorskip("playwright.sync_api", reason="the page was NOT tested: `make page-test` installs "
                                                               "playwright and says how to get a browser")
CHROMIUM = os.environ.get("TAP_CHROMIUM") or next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="the page was NOT tested: no Chromium on the PATH; "
                                                         "apt-get install chromium, or set TAP_CHROMIUM")
expect = playwright.expect

PROMPT = "The fox is here."
P, G = len(PROMPT), 8
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("page")) as stack:
        yield stack


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as player:
        browser = player.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield browser
        browser.close()


@pytest.fixture
def page(stack: Stack, browser: Any) -> Iterator[Any]:
    """A fresh tab; whatever it complained of, or asked of others, fails the test."""
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    page.set_default_timeout(10_000)
    wrong: list[str] = []
    # The page shows the reason of a refusal itself; the pixels are read back by these tests alone.
    expected = ("the server responded with a status of 4", "willReadFrequently")
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning")
            and not any(text in message.text for text in expected) else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.append(request.url)
            if not request.url.startswith("http://127.0.0.1:") else None)
    yield page
    page.close()
    assert wrong == []


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


def cell(page: Any, layer: int, position: int, n: int = 0) -> dict[str, float]:
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
    }""", [n, layer, position, 4])
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
    page.locator("input[type=file]").set_input_files(tmp_path / "direction.npy")
    x = rows(0, "resid_post", 1, [6], "bfloat16")[0].astype(np.float64)
    expect(told(page)).to_contain_text(f"projection {shown(float(x @ direction / np.linalg.norm(direction)))}")
    np.save(tmp_path / "short.npy", direction[:5])
    page.locator("input[type=file]").set_input_files(tmp_path / "short.npy")
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


def test_watches_a_capture_grow(page: Any, stack: Stack) -> None:
    def generate() -> None:
        stack.complete("Slowly", max_tokens=50, stream=True, play={"delay_s": 0.2, "live": True},
                       capture={"sites": ["resid_post"], "id": "01HZZZZZZZZZZZZZZZZZZZZZZZ", "codec": "raw"})

    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    generating = threading.Thread(target=generate)
    generating.start()
    try:
        page.goto(stack.url)
        page.locator(".captures li", has_text="running").first.click()
        page.locator("#map-0 canvas[data-columns]").wait_for()
        expect(page.locator(".live")).to_be_visible()
        seen = set()
        while page.locator(".live").is_visible():
            seen.add(int(page.locator("#map-0 canvas").get_attribute("data-columns")))
            page.wait_for_timeout(100)
        assert len(seen) >= 3 and min(seen) < 50, seen
        expect(page.locator(f"#map-0 canvas[data-columns='{6 + 49}']")).to_be_visible()
        expect(page.locator(".head")).to_contain_text("220 of 220")
        assert sum(url.endswith("/events") for url in asked) == 1  # told, not polled
        assert all(cell(page, layer, position)["colours"] == 1 for layer in (0, 3) for position in range(55))
    finally:
        generating.join()


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


def test_a_key_is_asked_for_kept_for_the_tab_and_forgotten(page: Any, stack: Stack, tmp_path: Path) -> None:
    from api.keys import make_key

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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("what", ["start", "capture", "pair"])
def test_accessible(page: Any, stack: Stack, capture: str, holed: str, what: str, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="`make page-test` installs it")
    # The checker is put in by the test: the page itself would not let it.
    page.close()
    context = page.context.browser.new_context(bypass_csp=True, color_scheme=scheme, reduced_motion="reduce")
    tab = context.new_page()
    try:
        tab.goto(f"{stack.url}/#{dict(start='', capture=capture, pair=f'{capture}~{holed}')[what]}")
        tab.locator(".captures li").first.wait_for()
        if what != "start":
            tab.locator("#map-0 canvas").click(position=cell_of(tab, 1, 6))
            tab.locator(".bars").wait_for()
            tab.get_by_text("Values as a table").click()
        found = axe.Axe().run(tab).response["violations"]
        assert [(each["id"], [node["html"][:150] for node in each["nodes"]][:3]) for each in found] == []
    finally:
        context.close()


def test_nothing_moves_for_who_wants_it_still_and_a_narrow_window_does_not_scroll_sideways(
        page: Any, stack: Stack, capture: str) -> None:
    page.emulate_media(reduced_motion="reduce")
    page.set_viewport_size({"width": 400, "height": 800})
    look(page, stack, capture)
    cell_of(page, 0, 0)
    assert page.evaluate("document.getAnimations().length") == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
