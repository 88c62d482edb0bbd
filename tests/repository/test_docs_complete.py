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
import typer.main
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families

from api.app import create_app
from api.config import Config
from api.errors import CODES
from api.metrics import Metrics
from api.slices.formats import DTYPES, FORMATS
from engine_side.config import SETTINGS as ENGINE
from engine_side.config import from_environment
from schemas.codecs import CODECS
from schemas.legacy import SETTINGS as EARLIER
from schemas.manifest import REASONS, STATUSES
from schemas.sites import SITES
from schemas.spec import CaptureSpec
from tests.support.pages import walk
from tests.support.pages.reference_pages import DOCS, PAGES, PARTS, SETTINGS, commands, with_parts
from tests.support.pages.settings import TESTS
from tests.support.processes import free_port
from tests.support.store_helpers import WriterProcess
from vllm_tap.cli.main import app

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
    found = Metrics(["a", "b"]).registry.collect()
    service = {metric.name + ("_total" if metric.type == "counter" else "") for metric in found}
    return service | {name for name in writer_metrics() if not name.endswith("_created")}


def routes() -> set[str]:
    app = create_app(Config(ROOT, "ipc:///tmp/none"))
    shown = [route for route in app.routes if isinstance(route, APIRoute) and route.include_in_schema]
    return {f"{method} {route.path.replace(':path}', '}')}" for route in shown for method in route.methods}


def codes() -> set[str]:
    """Of error answers: a status and then a code, the table of shared errors, and what is an error object by itself."""
    found = {code for _, code in answered()}
    for path, tree in sources("api"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                found |= {value.value for key, value in zip(node.keys, node.values, strict=True)
                          if isinstance(key, ast.Constant) and key.value == "code" and isinstance(value, ast.Constant)
                          and isinstance(value.value, str)}
            if path.name == "errors.py" and isinstance(node, ast.Tuple) and len(node.elts) == 2:
                found |= {part.value for part in node.elts[1:] if isinstance(part, ast.Constant)
                          and isinstance(part.value, str) and part.value.isidentifier()}
        if path.name == "guard.py":
            found |= {f"too_many_{counted}" for counted in re.findall(r'\(+"([a-z]+)", self\._', path.read_text())}
    return found


def answered() -> set[tuple[int, str]]:
    """Statuses and codes that stand side by side in the code."""
    pairs = set()
    for _, tree in sources("api"):
        for node in ast.walk(tree):
            parts = node.args if isinstance(node, ast.Call) else node.elts if isinstance(node, ast.Tuple) else []
            pairs |= set(pairwise(part.value if isinstance(part, ast.Constant) else None for part in parts))
    return {(status, code) for status, code in pairs  # type: ignore[misc]
            if isinstance(status, int) and 400 <= status < 600 and isinstance(code, str) and code.isidentifier()}


def spec_fields() -> set[str]:
    return {field.alias or name for name, field in CaptureSpec.model_fields.items()}


def compose_settings() -> set[str]:
    return set(re.findall(r"\$\{([A-Z_]+)", (ROOT / "docker" / "compose.yml").read_text()))


def targets() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    return {f"make {name}" for name in re.findall(r"^([a-z-]+):.*##", text, re.MULTILINE)}


HTTP: Final = tuple(f"docs/reference/http/{page}.md" for page in ("generate", "read", "live", "edits", "operate"))
# By kind: what there is, and the pages where one looks for it, each name in a span or block of code.
KINDS: Final[dict[str, tuple[Callable[[], Iterable[str]], tuple[str, ...]]]] = {
    "settings": (settings, ("docs/reference/settings.md",)),
    "flags of processes": (process_flags, ("docs/reference/commands.md",)),
    "metrics": (metrics, ("docs/reference/metrics.md",)),
    "routes": (routes, HTTP),
    "error codes": (codes, ("docs/reference/errors.md",)),
    "reasons of missing rows": (lambda: REASONS, ("docs/reference/store.md",)),
    "statuses": (lambda: STATUSES, HTTP),
    "fields of a spec": (spec_fields, ("docs/reference/spec.md",)),
    "sites": (lambda: SITES, ("docs/reference/spec.md",)),
    "codecs": (lambda: CODECS, ("docs/reference/codecs.md",)),
    "formats and dtypes": (lambda: [*FORMATS, *DTYPES], HTTP),
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


@pytest.mark.parametrize("name", PAGES)
def test_a_written_page_is_as_the_code_has_it(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "python -m tests.support.pages.reference_pages"


def test_every_setting_is_declared() -> None:
    declared = [name for _, _, found in SETTINGS for name in found if found is not TESTS]
    assert set(declared) == settings() and len(declared) == len(set(declared))
    assert all(of.unit and of.meaning.endswith(".") for of in [*ENGINE.values(), *EARLIER.values(), *TESTS.values()])
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    known = {flag for param in serve.params for flag in param.opts}
    assert {of.flag for of in [*ENGINE.values(), *EARLIER.values()]} - {""} <= known


def test_every_setting_of_tests_is_declared() -> None:
    texts = [path.read_text() for path in (ROOT / "tests").rglob("*.py") if path.name != "settings.py"]
    found = {name for text in texts for name in re.findall(r'"(TAP_[A-Z0-9_]+)"', text)}
    assert set(re.findall(r"\b(TAP_[A-Z0-9_]+)=", (ROOT / "Makefile").read_text())) <= found
    assert found == set(TESTS)


def test_defaults_of_settings_are_those_of_the_engine(tmp_path: Path) -> None:
    """An engine that is told the defaults is as one that is told nothing."""
    endpoint = {"VLLM_TAP_ENDPOINT": f"ipc://{tmp_path}/writer.sock"}
    said = {name: of.default.replace("8 GiB", str(8 << 30)) for name, of in ENGINE.items()
            if of.default and of.default not in ("the engine's own", "drawn at the start")}
    assert len(said) == 7 and from_environment({**said, **endpoint}) == from_environment(endpoint)
    for name in said.keys() - {"VLLM_TAP_OWN_GROUP"}:
        other = {"VLLM_TAP_ARM": "embed", "VLLM_TAP_ON_FULL": "wait", "VLLM_TAP_WRITERS": "several"}.get(name, "7")
        assert from_environment({**endpoint, name: other}) != from_environment(endpoint), name


def test_every_error_code_is_declared_with_its_status() -> None:
    declared = {(of.status, code) for code, of in CODES.items()}
    assert set(CODES) == codes()
    assert answered() <= declared and len(answered()) > 25
    assert all(of.when.endswith(".") and of.cure.endswith(".") for of in CODES.values())


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


# Pages of plain sentences: others join as they are rewritten.
PLAIN: Final = ("CONTRIBUTING.md", "README.md", "SECURITY.md", *(f"docs/{page}" for page in (
    "index.md", "concepts.md", "tutorials/first-capture.md", "tutorials/logit-lens.md", "howto/attention.md",
    "howto/buckets.md", "howto/coming-from.md", "howto/containers.md", "howto/edits.md", "howto/extend.md",
    "howto/look-inside.md", "howto/operate.md", "howto/patching.md", "howto/postgres.md", "howto/probes.md",
    "howto/ray.md",
    "howto/sae-training.md", "howto/several-engines.md", "howto/several-hosts.md", "howto/several-writers.md",
    "howto/troubleshooting.md", "howto/verify.md", "howto/xarray.md", "explain/security.md", "explain/tap.md",
    "explain/walk.md", "explain/what-it-does-not-do.md", "reference/bucket.md", "reference/codecs.md",
    "reference/errors.md", "reference/limits.md", "reference/metrics.md", "reference/operations.md",
    "reference/protocol.md", "reference/settings.md", "reference/sizes.md", "reference/spec.md", "reference/store.md",
    "evidence/fidelity-families.md", "evidence/faults.md", "evidence/fidelity.md", "evidence/kv.md",
    "evidence/models.md", "evidence/parity.md",
    "evidence/performance.md", "evidence/production-checklist.md", "notes/2026-11-decode-step.md",
    "notes/open-ends-speed.md", "notes/open-ends.md")), *HTTP)
WORDS_MAX: Final = 30  # of a sentence; 25 is the aim
_CLAUSE: Final = re.compile(r"\*?(What|Who|Whoever|Whatever|Where) ")


def sentences(page: str) -> list[str]:
    """Sentences with their ends, outside blocks of code, tables and headings."""
    text = re.sub(r"^```.*?^```$|^ *\|.*?$|^#.*?$", "\n\n", page, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    blocks = re.split(r"\n\s*\n|\n *(?=[-*] |\d+\. )", text)
    parts = [part for block in blocks for part in re.split(r"(?<=[.;:?!])\s", block)]
    return [re.sub(r"^([-*]|\d+\.) ", "", " ".join(part.split())) for part in parts if part.strip()]


def long_sentences(page: str) -> list[str]:
    """Sentences with more than WORDS_MAX words."""
    return [one for one in sentences(page) if len(one.split()) > WORDS_MAX]


def clauses(page: str) -> list[str]:
    """Sentences that begin with a clause in place of a subject or a condition; a question may."""
    return [one for one in sentences(page) if _CLAUSE.match(one) and not one.endswith("?")]


@pytest.mark.parametrize("page", PLAIN)
def test_sentences_are_short_and_begin_with_a_subject(page: str) -> None:
    text = (ROOT / page).read_text()
    assert long_sentences(text) == [] and clauses(text) == []


def test_a_long_sentence_is_seen() -> None:
    assert long_sentences("# T\n\nShort. " + "word " * 31 + "end.\n\n```\n" + "code " * 40 + "\n```\n") != []
    assert long_sentences("Short one. " * 20 + "\n| " + "cell " * 40 + "|\n") == []


def test_a_clause_in_place_of_a_subject_is_seen() -> None:
    page = "Rows come. What is armed costs.\n\n- Where it fits, it stays.\n  - *Who asks* waits\n\n# What holds\n"
    assert clauses(page) == ["What is armed costs.", "Where it fits, it stays.", "*Who asks* waits"]
    assert clauses("What holds? **What counts.** Rows.") == []


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
