"""The pages for researchers, SAE and safety teams, and those about HTTP: every block of Python, run as it stands.

Blocks that need vLLM itself are run beside a real engine: tests/engine/serving/test_recording.py, test_serve.py and
test_ray.py. The page about Ray is run on a real one: tests/vllm_tap/ray/test_howto.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from schemas.probes import Registered, load_probe
from tests.support.api_stack import Stack, running
from tests.support.engines.engine_player import LAYERS, WIDTH
from tests.support.pages.readme import blocks
from vllm_tap import Client

LACKING = [name for name in ("torch", "xarray", "datasets", "zarr", "tensorstore") if find_spec(name) is None]
needs_more = pytest.mark.skipif(bool(LACKING), reason=f"not installed: {', '.join(LACKING)}")
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
NEEDS_VLLM = ("from vllm import", "vllm_xargs", "AutoModelForCausalLM", "transformer_lens")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("howto")
    with running(folder, "bfloat16") as stack, Client(stack.url) as client:
        (folder / "captures").symlink_to(stack.store)
        client.generate_all([f"{n} " * (20 + n % 7) for n in range(16)], 20, at_once=4,
                            capture={"codec": "raw16", "tags": {"run": "train"}})
        yield stack


def run(page: str, stack: Stack, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the names of a page's blocks stand for in the end."""
    monkeypatch.chdir(stack.store.parent)
    space: dict[str, Any] = {"__name__": page}
    for number, block in enumerate(blocks("python", page)):
        if not any(word in block for word in NEEDS_VLLM):
            text = block.replace("http://127.0.0.1:8100", stack.url).replace('model="tiny"', 'model="played"')
            exec(compile(text, f"{page}, block {number}", "exec"), space)  # noqa: S102
    if "client" in space:
        space["client"].close()
    return space


@needs_more
def test_the_page_for_sae_teams(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    space = run("docs/howto/sae-training.md", stack, monkeypatch)
    assert space["losses"][-1] < space["losses"][0] and space["provider"].d_in == WIDTH
    assert space["x"].shape == space["y"].shape == (len(space["tokens"]), WIDTH)
    assert space["table"].column_names[-1] == "resid_post.2"


@needs_more
def test_the_page_for_researchers(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    space = run("docs/howto/look-inside.md", stack, monkeypatch)
    assert space["part"].values.shape == (2, 6, WIDTH) and np.isfinite(space["norms"].values).all()
    assert set(space["directions"]) == set(range(LAYERS)) and len(space["found"]) == 20
    assert space["last"].shape == (1, WIDTH) and len(space["table"]) == len(space["rows"])


@needs_more
def test_the_page_about_zarr(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    space = run("docs/howto/xarray.md", stack, monkeypatch)
    whole = space["whole"]
    assert whole.shape[1:] == (LAYERS, WIDTH) and np.array_equal(space["rows"].values, whole[:, 2])
    assert space["by_position"]["position"].values.tolist() == [2, 3, 4, 5]
    assert np.array_equal(space["last"], whole[-1]) and np.array_equal(space["by_tensorstore"], whole[:, 2])
    assert np.allclose(space["lazy_norms"], space["norms"]) and set(space["tree"].children) == {"resid_post"}


@needs_more
def test_the_page_for_those_who_come_from_elsewhere(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    space = run("docs/howto/coming-from.md", stack, monkeypatch)
    assert space["last"].shape == (WIDTH,) and f"blocks.{LAYERS - 1}.hook_resid_post" in space["cache"]


@needs_more
def test_the_pages_about_http(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    space = run("docs/reference/http/read.md", stack, monkeypatch)
    assert space["generation"].capture.id and len(space["prompts"]) == 2
    assert len(run("docs/reference/http/edits.md", stack, monkeypatch)["direction"]) == WIDTH
    space = run("docs/reference/http/generate.md", stack, monkeypatch)
    assert space["answer"].model_extra["capture"]["id"] != space["message"].capture["id"]
    space["openai"].close()
    space["claude"].close()


def test_the_page_for_safety_teams(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The played engine has a probe of that name, of which the page's own file is no part."""
    space = run("docs/howto/probes.md", stack, monkeypatch)
    found = load_probe(Registered("tone", stack.store.parent / "tone.safetensors"))
    assert (found.about.site, found.about.layer, found.about.names) == ("resid_post", 2, ["glad", "sad"])
    glad, sad = (found.directions @ space[name].mean(0) + found.bias for name in ("glad", "sad"))
    assert glad[0] > 0 > glad[1] and sad[0] < 0 < sad[1]
    assert sorted(space["scores"]) == list(range(len(space["scores"]))) and len(space["scores"]) > 12
    assert space["part"]["values"] == space["tone"].tolist()
    assert space["x"].shape == (7, WIDTH) and space["scored"].shape == (7, 2) and len(space["every"]) >= 2


def test_no_block_is_left_out_by_accident() -> None:
    pages = ("docs/howto/sae-training.md", "docs/howto/look-inside.md", "docs/howto/probes.md", "docs/howto/xarray.md",
             "docs/howto/ray.md")
    left = [block for page in pages for block in blocks("python", page)
            if any(word in block for word in NEEDS_VLLM)]
    assert len(left) == 4
