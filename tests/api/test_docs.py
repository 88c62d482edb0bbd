"""The pages about the service name every route, parameter and header that the code has."""

from __future__ import annotations

import json
import re

import pytest

from api.app import create_app
from api.config import Config
from api.slices.formats import DTYPES, FORMATS
from api.slices.query import SliceQuery
from schemas.manifest import STATUSES
from tests.support.api_stack import ROOT

PAGE = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "reference" / "http").glob("*.md")))
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "api").rglob("*.py")))


def routes() -> list[str]:
    paths = create_app(Config(ROOT, "ipc:///tmp/none")).openapi()["paths"]
    return [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]


@pytest.mark.parametrize("route", routes())
def test_routes(route: str) -> None:
    method, path = route.split()
    assert f"`{method} {path.replace('{model}', '{model}')}" in PAGE


@pytest.mark.parametrize("header", sorted(set(re.findall(r'"(X-Tap-[A-Za-z-]+)"', SOURCE))))
def test_headers(header: str) -> None:
    assert f"`{header}`" in PAGE


@pytest.mark.parametrize("name", [*SliceQuery.model_fields, *FORMATS, *DTYPES, *STATUSES])
def test_parameters_formats_and_statuses(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_every_reference_of_the_description_leads_somewhere() -> None:
    description = create_app(Config(ROOT, "ipc:///tmp/none")).openapi()
    found = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(description)))
    assert {"#/components/schemas/EditSpec", "#/components/schemas/Source", "#/components/schemas/Error"} <= found
    for reference in found:
        part = description
        for name in reference.removeprefix("#/").split("/"):
            part = part[name]
