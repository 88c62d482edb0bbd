"""The site builds without a warning, has every page and every public name, and fetches nothing from elsewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import vllm_tap
from tests.support.pages import site


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built pages."""
    project = site.copy_to(tmp_path_factory.mktemp("site"))
    assert "No issues found" in site.build(project)
    return project / "build" / "site"


def test_every_page_is_built_and_found_by_search(built: Path) -> None:
    index = json.loads((built / "search.json").read_text())
    found = {item["location"].partition("#")[0] for item in index["items"]}
    for page in site.pages():
        address = "" if page == "index.md" else f"{page.removesuffix('.md')}/"
        assert (built / address / "index.html").stat().st_size > 5000, page
        assert address in found, page
    assert (built / "llms.txt").read_text().count("\n# ") >= len(site.pages()) - 1


def test_every_public_name_is_in_the_reference(built: Path) -> None:
    page = (built / "reference" / "python" / "index.html").read_text()
    assert [name for name in vllm_tap.__all__ if f'id="vllm_tap.{name}"' not in page] == []
    assert "float32" in page and "&gt;&gt;&gt;" in page and "doctest" not in page


def test_the_site_fetches_nothing_from_elsewhere(built: Path) -> None:
    fetched = re.compile(r"<(?:script|img|iframe|link)[^>]*(?:src|href)=\"?(?:https?:)?//[^\" >]+")
    assert [found for path in built.rglob("*.html") for found in fetched.findall(path.read_text())] == []


DEFECTS = {
    "[away](reference/gone.md)": "page does not exist",
    "[nowhere](reference/limits.md#gone)": "anchor",
    "[`Nobody`][vllm_tap.Nobody]": "unresolved",
}


def test_what_leads_nowhere_ends_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs" / "reference").mkdir(parents=True)
    (tmp_path / "mkdocs.yml").write_text(site.CONFIG.read_text().partition("\nnav:\n")[0])
    (tmp_path / "docs" / "reference" / "limits.md").write_text("# Limits\n")
    (tmp_path / "docs" / "index.md").write_text("# Home\n\n" + "\n\n".join(DEFECTS) + "\n")
    with pytest.raises(site.SiteError) as raised:
        site.build(tmp_path)
    assert [word for word in DEFECTS.values() if word not in str(raised.value)] == []
    assert "3 issues found" in str(raised.value)


def test_a_page_that_is_in_no_navigation_ends_the_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "mkdocs.yml"
    config.write_text(site.CONFIG.read_text().replace("      - Limits: reference/limits.md\n", ""))
    monkeypatch.setattr(site, "CONFIG", config)
    with pytest.raises(site.SiteError, match=r"alone: reference/limits\.md"):
        site.build(tmp_path)
