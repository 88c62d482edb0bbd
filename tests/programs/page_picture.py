"""Takes docs/images/page.png and docs/images/probe.png: the page with captures of a small model of
twelve layers that serves for it.

Run as ``python -m tests.programs.page_picture``; needs what tests/api/page/test_page.py needs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
from playwright.sync_api import Page, sync_playwright
from safetensors.numpy import save_file

from tests.api.page.test_page import ARGS
from tests.support.api_stack import ROOT
from tests.support.processes import PATIENCE_S
from vllm_tap import tiny_model

URL = "http://127.0.0.1:8290"
PROMPT = ("A model reads a river of words. Each layer adds what it found: the name of the lake, the light over the "
          "harbour, the question behind the answer.")


def main() -> int:
    tiny_model.LAYERS, tiny_model.RECIPE = 12, 112  # type: ignore[misc]
    folder = Path(tempfile.mkdtemp())
    model = folder / "small-model"
    shutil.copytree(tiny_model.tiny_model(), model)
    width = json.loads((model / "config.json").read_text())["hidden_size"]
    directions = np.random.default_rng(4).standard_normal((3, width)).astype(np.float32) / width**0.5
    save_file({"directions": directions}, folder / "tone.safetensors", metadata={
        "site": "resid_post", "layer": "9", "names": "glad, sad, calm"})
    server = subprocess.Popen([
        sys.executable, "-m", "vllm_tap", "serve", str(model), "--store", str(folder / "store"),
        "--port", URL.rpartition(":")[2], "--engine-port", "8291", "--arm", "resid_post,attn_out,mlp_out",
        "--probe", f"tone={folder / 'tone.safetensors'}", "--",
        "--dtype", "float32"])
    try:
        end_s = time.monotonic() + PATIENCE_S
        while not _ready():
            assert server.poll() is None and time.monotonic() < end_s, "the service does not start"
            time.sleep(1)
        served = httpx.get(f"{URL}/v1/models").json()["data"][0]["id"]
        captures = dict[str, str]()
        for name, prompt in (("a-question", "What is the name of the lake?"),
                             ("another-river", PROMPT.replace("river", "sea")), ("a-river-of-words", PROMPT)):
            answer = httpx.post(f"{URL}/v1/completions", timeout=PATIENCE_S, headers={"X-Request-Id": name}, json={
                "model": served, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True,
                "capture": {"sites": ["resid_post", "attn_out"], "probe": ["tone"], "tags": {"run": "picture"}}})
            assert answer.status_code == 200, answer.text
            captures[name] = answer.json()["capture"]["id"]
        with sync_playwright() as player:
            browser = player.chromium.launch(executable_path=shutil.which("chromium"), args=ARGS)
            page = browser.new_page(viewport={"width": 1280, "height": 980})
            page.goto(f"{URL}/#{captures['a-river-of-words']}")
            _take_map(page, ROOT / "docs" / "images" / "page.png")
            _take_probe(page, ROOT / "docs" / "images" / "probe.png")
            browser.close()
    finally:
        server.terminate()
        server.wait(PATIENCE_S)
        shutil.rmtree(folder)
    return 0


def _ready() -> bool:
    try:
        return httpx.get(f"{URL}/readyz").status_code == 200
    except httpx.HTTPError:
        return False


def _take_map(page: Page, path: Path) -> None:
    page.get_by_label("Colours").and_(page.locator("select")).select_option("log")
    canvas = page.locator("#map-0 canvas[data-cell]")
    canvas.wait_for()
    page.wait_for_timeout(1500)
    width, height = map(int, canvas.get_attribute("data-cell").split("x"))  # type: ignore[union-attr]
    canvas.click(position={"x": 5.5 * width, "y": 3.5 * height})
    page.locator(".bars").wait_for()
    page.wait_for_timeout(500)
    page.screenshot(path=path)


def _take_probe(page: Page, path: Path) -> None:
    page.set_viewport_size({"width": 1280, "height": 760})
    page.get_by_label("Site").select_option("probe.tone")
    page.get_by_label("Colours").and_(page.locator("select")).select_option("linear")
    page.locator("#text-0 .word").nth(12).click()
    page.mouse.move(0, 0)
    page.wait_for_timeout(500)
    page.screenshot(path=path)


if __name__ == "__main__":
    raise SystemExit(main())
