"""The whole API against its own description: whatever may be sent is answered as the description says.

Fifty examples are drawn for each operation; ``make soak`` draws a thousand, and covers every parameter's limits.
"""

from __future__ import annotations

import io
import re
import zlib
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from schemathesis.config import SchemathesisConfig

from api.app import create_app
from api.config import Config
from tests.support.api_stack import ROOT, Stack, running
from tests.support.engines.engine_player import WIDTH
from tests.support.processes import PATIENCE_S

# What fits the description may still be refused: a stop before its start, a layer that is not there, JSON too long.
REFUSED = ["2xx", "304", "400", "404", "406", "409", "410", "413", "416", "429", "503", "504"]
DESCRIPTION = create_app(Config(ROOT, "ipc:///tmp/none")).openapi()
NAME = re.compile(DESCRIPTION["paths"]["/v1/captures/{ref}"]["get"]["parameters"][0]["schema"]["pattern"])



@st.composite
def direction(draw: st.DrawFn) -> bytes:
    """A file with numbers in it: of a row's width, as a rule, for all layers or for each."""
    shape = draw(st.sampled_from([(WIDTH,), (1, WIDTH), (WIDTH,), (4, WIDTH), (WIDTH + 1,), (0,), (2, 2, WIDTH)]))
    dtype = draw(st.sampled_from([np.float16, np.float32, np.float64, np.int8]))
    number = draw(st.sampled_from([1.0, -2.5, 6e4, 0.0, float("nan"), float("inf")]))
    numbers = np.full(shape, 1 if dtype is np.int8 else number, dtype)
    if draw(st.booleans()):
        return save({"direction": numbers})
    file = io.BytesIO()
    np.save(file, numbers)
    return file.getvalue()


# Bytes at random are no direction: they would be refused before anything is looked up.
schemathesis.openapi.media_type("application/octet-stream", direction() | st.binary())


def described(coverage: bool) -> schemathesis.BaseSchema:
    """The description with every check on; ``coverage``: with the cases that go through each parameter's limits too."""
    return schemathesis.openapi.from_dict(DESCRIPTION, config=SchemathesisConfig.from_dict({
        "phases": {"coverage": {"enabled": coverage}},
        "checks": {"positive_data_acceptance": {"expected-statuses": REFUSED},
                   "negative_data_rejection": {"expected-statuses": [
                       "400", "404", "405", "406", "409", "410", "413", "416"]}},
    }))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("schema"), "bfloat16", owner="fuzz") as stack:
        yield stack


@pytest.fixture(scope="module")
def known(stack: Stack) -> list[str]:
    """Names that name something."""
    made = stack.http.post("/v1/completions", json={"model": "played", "prompt": "hello", "capture": {}},
                           headers={"x-request-id": "known"}).json()
    several = stack.complete("hello", n=2, capture={"codec": "raw"}).json()["capture"]
    return [made["capture"]["id"], "known", made["id"], several["id"], several["ids"][1]]


def new_capture(stack: Stack) -> str:
    return str(stack.complete("hello", capture={}).json()["capture"]["id"])


@pytest.fixture(scope="module")
def answered() -> Counter[tuple[str, int]]:
    """How often each operation was answered with which status."""
    return Counter()


def check(case: schemathesis.Case, stack: Stack, known: list[str], answered: Counter[tuple[str, int]]) -> None:
    """One request, by whatever name, held against the description with every check there is."""
    parameters, number = case.path_parameters, pick(case, known)
    # A name at random names nothing; one that cannot be a name must be refused as it is.
    if parameters and NAME.fullmatch(str(parameters.get("ref", ""))) and number < 2 * len(known):
        gone = case.method == "DELETE" and case.path == "/v1/captures/{ref}"
        parameters["ref"] = new_capture(stack) if gone else known[number % len(known)]
    if isinstance(case.body, dict):
        for name, most in (("max_tokens", 8), ("max_output_tokens", 8), ("n", 4)):  # the model server is a small one
            if type(case.body.get(name)) is int:
                case.body[name] = min(case.body[name], most)
    for name, value in (case.query or {}).items():
        if isinstance(value, list):  # of a head beyond 64 KiB the service reads no more: its refusal may be cut off
            case.query[name] = value[:500]
    case.headers.clear()  # a made-up key would go along with the true one; no other is described
    answer = case.call_and_validate(base_url=stack.url, headers={"Authorization": f"Bearer {stack.key}"},
                                    timeout=PATIENCE_S)
    answered[f"{case.method} {case.path}", answer.status_code] += 1


def pick(case: schemathesis.Case, known: list[str]) -> int:
    return zlib.crc32(f"{case.path_parameters}{case.query}".encode("utf-8", "surrogatepass")) % (3 * len(known))


@described(coverage=False).parametrize()
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_operation_is_as_described(
        case: schemathesis.Case, stack: Stack, known: list[str], answered: Counter[tuple[str, int]]
) -> None:
    check(case, stack, known, answered)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@described(coverage=True).parametrize()
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_operation_is_as_described_at_length(
        case: schemathesis.Case, stack: Stack, known: list[str], answered: Counter[tuple[str, int]]
) -> None:
    check(case, stack, known, answered)


def test_directions_were_valid_ones_too(answered: Counter[tuple[str, int]]) -> None:
    operation = "POST /v1/captures/{ref}/map"
    tried = {status: count for (asked, status), count in answered.items() if asked == operation}
    if not tried:
        pytest.skip("the operation was not chosen")
    assert tried.get(200), tried
