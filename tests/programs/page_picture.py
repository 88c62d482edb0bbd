"""Takes docs/page.png: the page with a capture of a small model of twelve layers that serves for it.

Run as ``python -m tests.programs.page_picture``; needs what tests/test_page.py needs.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from playwright.sync_api import sync_playwright

from tests.api_stack import ROOT
from tests.test_page import ARGS
from vllm_tap import tiny_model

URL = "http://127.0.0.1:8290"
PROMPT = ("A model reads a river of words. Each layer adds what it found: the name of the lake, the light over the "
          "harbour, the question behind the answer.")


def main() -> int:
    tiny_model.LAYERS, tiny_model.RECIPE = 12, 112  # type: ignore[misc]
    folder = Path(tempfile.mkdtemp())
    model = folder / "small-model"
    shutil.copytree(tiny_model.tiny_model(), model)
    server = subprocess.Popen([
        sys.executable, "-m", "vllm_tap", "serve", str(model), "--store", str(folder / "store"),
        "--port", URL.rpartition(":")[2], "--engine-port", "8291", "--arm", "resid_post,attn_out,mlp_out", "--",
        "--dtype", "float32"])
    try:
        end_s = time.monotonic() + 240
        while not _ready():
            assert server.poll() is None and time.monotonic() < end_s, "the service does not start"
            time.sleep(1)
        served = httpx.get(f"{URL}/v1/models").json()["data"][0]["id"]
        capture = ""
        for name, prompt in (("a-question", "What is the name of the lake?"),
                             ("another-river", PROMPT.replace("river", "sea")), ("a-river-of-words", PROMPT)):
            answer = httpx.post(f"{URL}/v1/completions", timeout=120, headers={"X-Request-Id": name}, json={
                "model": served, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True,
                "capture": {"sites": ["resid_post", "attn_out"], "tags": {"run": "picture"}}})
            assert answer.status_code == 200, answer.text
            capture = answer.json()["capture"]["id"]
        _take(capture, ROOT / "docs" / "page.png")
    finally:
        server.terminate()
        server.wait(30)
        shutil.rmtree(folder)
    return 0


def _ready() -> bool:
    try:
        return httpx.get(f"{URL}/readyz").status_code == 200
    except httpx.HTTPError:
        return False


def _take(capture: str, path: Path) -> None:
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=shutil.which("chromium"), args=ARGS)
        page = browser.new_page(viewport={"width": 1280, "height": 980})
        page.goto(f"{URL}/#{capture}")
        page.get_by_label("Colours").and_(page.locator("select")).select_option("log")
        canvas = page.locator("#map-0 canvas[data-cell]")
        canvas.wait_for()
        page.wait_for_timeout(1500)
        width, height = map(int, canvas.get_attribute("data-cell").split("x"))  # type: ignore[union-attr]
        canvas.click(position={"x": 5.5 * width, "y": 3.5 * height})
        page.locator(".bars").wait_for()
        page.wait_for_timeout(500)
        page.screenshot(path=path)
        browser.close()


if __name__ == "__main__":
    raise SystemExit(main())
