"""Whatever can be set, asked, answered or measured is on the page where one looks for it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import httpx
import pytest
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families

from api.app import create_app
from api.config import Config
from api.metrics import Metrics
from api.slices.formats import DTYPES, FORMATS
from schemas.codecs import CODECS
from schemas.manifest import REASONS, STATUSES
from schemas.sites import SITES
from schemas.spec import CaptureSpec
from tests.support.pages import walk
from tests.support.pages.reference_pages import DOCS, PARTS, commands, commands_page, with_parts
from tests.support.processes import free_port
from tests.support.store_helpers import WriterProcess

ROOT: Final = Path(__file__).parents[2]
SHIPPED: Final = ("engine_side", "writer_service", "api", "schemas", "vllm_tap")
INTERNAL: Final = {"VLLM_TAP_SALT"}  # a key in vLLM's own table that its caches hash, never read from the environment


def sources(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text())


def strings(*folders: str) -> Iterator[str]:
    """Every string in the code; docstrings too, since what they name is to be found as well."""
    for _, tree in sources(*folders):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def settings() -> set[str]:
    name = re.compile(r"\b(?:VLLM_TAP|TAP|VLLM_ACT)_[A-Z_]*[A-Z]\b")
    return {found for text in strings(*SHIPPED) for found in name.findall(text)} - INTERNAL


def flags() -> set[str]:
    return {f"{name} {flag}" for name, command in commands() for param in command.params for flag in param.opts
            if flag.startswith("--") and flag != "--help"}


def process_flags() -> set[str]:
    """Of the processes that ``serve`` starts, and of who starts them alone."""
    return {node.args[0].value for path, tree in sources("api", "writer_service") for node in ast.walk(tree)
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
            and isinstance(node.args[0], ast.Constant) and str(node.args[0].value).startswith("--")}


@cache
def writer_metrics() -> frozenset[str]:
    """As a writer tells them that has just been started."""
    port = free_port()
    with TemporaryDirectory() as folder, WriterProcess(Path(folder) / "store", "--metrics-port", str(port)):
        families = list(text_string_to_metric_families(httpx.get(f"http://127.0.0.1:{port}/metrics").text))
    return frozenset(family.name + ("_total" if family.type == "counter" else "") for family in families)


def metrics() -> set[str]:
    """Of the service and of the writer; the engine tells its own to them."""
    service = {metric.name + ("_total" if metric.type == "counter" else "") for metric in Metrics().registry.collect()}
    return service | {name for name in writer_metrics() if not name.endswith("_created")}


def routes() -> set[str]:
    app = create_app(Config(ROOT, "ipc:///tmp/none"))
    shown = [route for route in app.routes if isinstance(route, APIRoute) and route.include_in_schema]
    return {f"{method} {route.path.replace(':path}', '}')}" for route in shown for method in route.methods}


def codes() -> set[str]:
    """Of error answers: a status and then a code, the table of shared errors, and what is an error object by itself."""
    found = set()
    for path, tree in sources("api"):
        for node in ast.walk(tree):
            parts = node.args if isinstance(node, ast.Call) else node.elts if isinstance(node, ast.Tuple) else []
            values = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            found |= {code for status, code in pairwise(values)
                      if isinstance(status, int) and 400 <= status < 600 and isinstance(code, str)}
            if isinstance(node, ast.Dict):
                found |= {value.value for key, value in zip(node.keys, node.values, strict=True)
                          if isinstance(key, ast.Constant) and key.value == "code" and isinstance(value, ast.Constant)}
        if path.name == "errors.py":
            found |= set(re.findall(r'"\s*, "([a-z_]+)"\)', path.read_text()))
            found |= set(re.findall(r'\), "([a-z_]+)"\)', path.read_text()))
    return {code for code in found if isinstance(code, str)}


def spec_fields() -> set[str]:
    return {field.alias or name for name, field in CaptureSpec.model_fields.items()}


def compose_settings() -> set[str]:
    return set(re.findall(r"\$\{([A-Z_]+)", (ROOT / "docker" / "compose.yml").read_text()))


def targets() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    return {f"make {name}" for name in re.findall(r"^([a-z-]+):.*##", text, re.MULTILINE)}


# By kind: what there is, and the pages where one looks for it, each name in a span or block of code.
KINDS: Final[dict[str, tuple[Callable[[], Iterable[str]], tuple[str, ...]]]] = {
    "settings": (settings, ("docs/explain/tap.md", "docs/reference/operations.md", "docs/reference/http.md")),
    "flags of processes": (process_flags, ("docs/reference/http.md", "docs/reference/operations.md")),
    "metrics": (metrics, ("docs/reference/http.md", "docs/reference/operations.md")),
    "routes": (routes, ("docs/reference/http.md",)),
    "error codes": (codes, ("docs/reference/http.md",)),
    "reasons of missing rows": (lambda: REASONS, ("docs/reference/store.md",)),
    "statuses": (lambda: STATUSES, ("docs/reference/http.md",)),
    "fields of a spec": (spec_fields, ("docs/reference/spec.md",)),
    "sites": (lambda: SITES, ("docs/reference/spec.md",)),
    "codecs": (lambda: CODECS, ("docs/reference/codecs.md",)),
    "formats and dtypes": (lambda: [*FORMATS, *DTYPES], ("docs/reference/http.md",)),
    "settings of the compose file": (compose_settings, ("docs/howto/containers.md",)),
    "make targets": (targets, ("CONTRIBUTING.md",)),
}
_CODE: Final = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)


def lacking(names: Iterable[str], pages: Iterable[str]) -> list[str]:
    """Which names stand in no code of the pages, as words of their own."""
    code = " ".join(found.group() for page in pages for found in _CODE.finditer(page))
    return sorted(name for name in names if not _word(name).search(code))


def _word(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w/{{-]){re.escape(name)}(?![\w-])(?!/[a-z{{])")


@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_on_its_page(kind: str) -> None:
    names, pages = set(KINDS[kind][0]()), [(ROOT / page).read_text() for page in KINDS[kind][1]]
    assert len(names) >= 5, "what there is was not found"
    assert lacking(names, pages) == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_taken_off_its_page_is_missed(kind: str) -> None:
    pages = [(ROOT / page).read_text() for page in KINDS[kind][1]]
    for name in KINDS[kind][0]():
        assert lacking([name], [_word(name).sub("", page) for page in pages]) == [name]


def test_every_command_and_flag_is_on_its_page_as_the_code_has_it() -> None:
    page = (DOCS / "reference/commands.md").read_text()
    assert page == commands_page(), "python -m tests.support.pages.reference_pages"
    assert all(f"`{name.rpartition(' ')[2]}`" in page for name in flags())


@pytest.mark.parametrize("name", PARTS)
def test_tables_are_on_their_page_as_the_code_has_them(name: str) -> None:
    assert (DOCS / name).read_text() == with_parts(name), "python -m tests.support.pages.reference_pages"


def test_the_index_leads_to_every_page() -> None:
    index = (DOCS / "index.md").read_text()
    for path in sorted(DOCS.rglob("*.md")):
        assert path.name == "index.md" or f"({path.relative_to(DOCS)}" in index, path
    assert "docs/index.md" in (ROOT / "README.md").read_text()


def anchors(page: Path) -> set[str]:
    """Of its headings, as they are linked to."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_to_parts_of_pages_lead_there() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]:
        for file, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
            assert anchor in anchors(page.parent / file if file else page), f"{page.name}: {file}#{anchor}"


def test_messages_are_quoted_as_the_code_says_them() -> None:
    said = set(strings(*SHIPPED))
    page = (DOCS / "howto" / "troubleshooting.md").read_text()
    symptoms = re.findall(r"^\| (.*?) \|", page, re.MULTILINE)
    quoted = [text for symptom in symptoms for text in re.findall(r"`([^`]+)`", symptom)]
    assert len(quoted) > 15
    names = {"MissingRows", "NotComplete", "int8b64", "q", "k"}
    assert [text for text in quoted if text not in names and not any(text in one for one in said)] == []


# ── recipes ─────────────────────────────────────────────────────────────────────────────────────────────────────


def named_in(path: Path) -> set[str]:
    """Names that a file gives to functions, classes and values, those of a class as Class.name."""
    found: set[str] = set()

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                assigned = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(prefix + target.id for target in assigned if isinstance(target, ast.Name))

    walk(ast.parse(path.read_text()).body, "")
    return found


def stale(page: str) -> list[str]:
    """Files, names in files, and commands that a page names and that are not there."""
    wrong = []
    for file, _, name in re.findall(r"`([\w./-]+/[\w.-]*)(:([\w.]+))?`", page):
        path = ROOT / file
        if not path.exists() or (name and name not in named_in(path)):
            wrong.append(f"{file}:{name}" if name else file)
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    command_line = r"(?:make|python -m) "
    for command in re.findall(rf"`({command_line}[^`]+)`", page) + re.findall(rf"^({command_line}.*)$", page, re.M):
        what, *words = command.split()
        if what == "make":
            known = f"make {words[0]}" in targets()
            chosen = re.findall(r'K="([^"]*)"', command)
            known &= all(word in tests for text in chosen for word in text.split(" or "))
        else:
            module = ROOT / words[1].replace(".", "/")
            known = module.with_suffix(".py").exists() or (module / "__main__.py").exists()
        if not known:
            wrong.append(command)
    return wrong


RECIPES: Final = ("howto/extend.md", "explain/walk.md")


@pytest.mark.parametrize("page", RECIPES)
def test_recipes_name_what_there_is(page: str) -> None:
    text = (DOCS / page).read_text()
    assert text.count("/") > 20 and stale(text) == []


def test_the_walk_of_a_row_is_short() -> None:
    cost = walk.named()
    assert len({place.partition(":")[0] for place in cost}) == 20 and sum(cost.values()) <= 500


def test_what_a_recipe_names_wrongly_is_seen() -> None:
    page = """`schemas/codecs/full8.py:streams` `schemas/codecs/full9.py` `schemas/codecs/full8.py:no`
`make test` `make tost` `python -m bench` `python -m bunch` `vllm_tap/client/` `vllm_tap/clients/`
`schemas/codecs/declare.py:CodecFamily.projected`
make test K="test_codecs or test_codex"
"""
    assert stale(page) == ["schemas/codecs/full9.py", "schemas/codecs/full8.py:no", "vllm_tap/clients/", "make tost",
                           "python -m bunch", 'make test K="test_codecs or test_codex"']
