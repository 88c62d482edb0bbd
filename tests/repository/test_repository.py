"""What holds for the repository as a whole: boundaries between packages, honest documents, nothing of any machine."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tests.support.pages.readme import blocks, commands
from tests.support.processes import PATIENCE_S
from vllm_tap.cli.main import app

ROOT = Path(__file__).parents[2]
PACKAGES = ("engine_side", "writer_service", "api", "schemas", "vllm_tap")
MAY_IMPORT = {
    "schemas": {"schemas"},
    "engine_side": {"engine_side", "schemas"},
    "writer_service": {"writer_service", "schemas"},
    "api": {"api", "schemas"},
    "vllm_tap": {"vllm_tap", "schemas", "api", "writer_service", "engine_side"},
}
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", *sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


def tracked() -> list[Path]:
    """Files that git knows, or would take."""
    done = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                          capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / line for line in done.stdout.splitlines() if (ROOT / line).is_file()]


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module)


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


# ── code ────────────────────────────────────────────────────────────────────────────────────────────────────────


# What a docstring does not begin with: a clause in place of the noun or verb that it is about.
_CLAUSE = re.compile(r"(What|Who|Whoever|Whatever|Where|Wherever|That|Those|How|However|Which|Of|By|As|For|In|From|"
                     r"Until|All that|Everything that|Nothing|Nobody|So) ")


def clauses(source: str) -> list[str]:
    """First lines of docstrings that begin with a clause."""
    found = [doc for node in ast.walk(ast.parse(source))
             if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
             and (doc := ast.get_docstring(node))]
    return [doc.splitlines()[0] for doc in found if _CLAUSE.match(doc)]


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    sources = [path for path in tracked() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in PACKAGES]
    assert {str(path): found for path in sources if (found := clauses(path.read_text()))} == {}
    assert clauses('"""Rows."""\ndef f():\n    """What rows are."""') == ["What rows are."]


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_they_may(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = [f"{path.relative_to(ROOT)} imports {name}" for path in files for name in imports(path)
             if name.split(".")[0] in PACKAGES and name.split(".")[0] not in MAY_IMPORT[package]]
    assert wrong == []


# From what stands on its own to what is built on it: a room imports those before it. Files beside them are of no room.
ROOMS = {
    "schemas": ["native", "codecs", "edits", "wire", "catalog", "store", "objects", "postgres", "read", "zarr_view",
                "bucket"],
    "writer_service": ["catalog", "journal", "seal", "upkeep", "recover", "receive", "tools"],
    "engine_side": ["codecs", "transport", "kernels", "tap", "discovery", "edits", "front", "step", "seams"],
    "api": ["page", "auth", "bucket", "slices", "engines", "generate", "live", "routes"],
    "vllm_tap": ["client", "loader", "ray", "serve", "offline", "sites", "verify", "fidelity", "export", "bucket",
                 "cli", "demo"],
}
FILES_MAX = 14  # in a room; plug-ins of one kind, a file each, may be more
PLUG_INS = {"schemas/codecs", "engine_side/codecs"}


def modules(package: str) -> dict[str, Path]:
    """The files of a package by the name they are imported by."""
    files = (ROOT / package).rglob("*.py")
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def imported(package: str) -> dict[str, set[str]]:
    """What each module of a package imports of the same package, wherever in it."""
    found = modules(package)

    def module_of(name: str) -> str:
        return name if name in found or "." not in name else module_of(name.rpartition(".")[0])

    graph = {}
    for name, path in found.items():
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                node.body = []  # a type's name is no import
        names = [f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
                 for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
        graph[name] = {module_of(one) for one in names if one.split(".")[0] == package} - {name, package}
    return graph


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_are_small_and_import_one_way(package: str) -> None:
    rooms = [path.name for path in (ROOT / package).iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert sorted(rooms) == sorted(ROOMS[package])
    for path in (ROOT / package, *((ROOT / package / room) for room in rooms)):
        count = len(list(path.glob("*.py")))
        assert count <= FILES_MAX or path.relative_to(ROOT).as_posix() in PLUG_INS, f"{path}: {count} files"

    def room_of(name: str) -> str | None:
        part = name.split(".")[1]
        return part if part in rooms else None

    wrong = [f"{name} imports {other}" for name, others in imported(package).items() if "." in name
             for other in others if (mine := room_of(name)) and (its := room_of(other)) and mine != its
             and ROOMS[package].index(its) > ROOMS[package].index(mine)]
    assert wrong == []


TEST_ROOMS = {  # beside one of every package, which mirrors its rooms
    "engine": "real vLLM", "faults": "the matrix of faults", "gpu": "needs a GPU", "line": "several processes",
    "mutants": "code that must not pass", "programs": "run as processes", "repository": "the repository itself",
    "support": "what tests are made with", "survey": "a small model of every architecture of vLLM",
}


def test_tests_mirror_the_rooms() -> None:
    tests = ROOT / "tests"
    assert sorted(path.name for path in tests.glob("*.py")) == ["__init__.py", "conftest.py"]
    rooms = {path.name for path in tests.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == {*PACKAGES, *TEST_ROOMS}
    for package in PACKAGES:
        inner = {path.name for path in (tests / package).iterdir() if path.is_dir() and path.name != "__pycache__"}
        assert inner <= set(ROOMS[package]), f"tests/{package} has rooms that {package} has not"
    for folder in (tests, *(path for path in tests.rglob("*") if path.is_dir())):
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= FILES_MAX, f"{folder.relative_to(ROOT)}: {len(files)} files"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circle_of_imports(package: str) -> None:
    graph = imported(package)
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " → ".join((*way[way.index(name):], name))
        if name not in done:
            for other in graph.get(name, ()):
                visit(other, (*way, name))
            done.add(name)

    for name in graph:
        visit(name, ())


LINES_MAX, PARAMETERS_MAX = 60, 8  # of a function; parameters without self
# Signatures that are lists of options, each given by its name.
OPTION_LISTS = {
    "vllm_tap/client/client.py:Client.captures", "vllm_tap/client/async_client.py:AsyncClient.captures",
    "vllm_tap/store.py:Store.captures", "vllm_tap/loader/dataset.py:rows", "vllm_tap/offline/recording.py:recording",
    "vllm_tap/cli/sizes.py:sizes", "vllm_tap/ray/captures.py:read_captures",
}


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of a file, those in functions too, by its name with that of its class."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            name = prefix + child.name if named else ""
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, child
            yield from walk(child, f"{name}." if name else prefix)

    yield from walk(ast.parse(path.read_text()), "")


def test_functions_are_small() -> None:
    """But kernels, which Triton compiles, and commands, whose parameters are their flags."""
    found = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        if place.startswith("engine_side/kernels/"):
            continue
        for name, node in functions(path):
            given = node.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
            count = len(every) - (bool(every) and every[0].arg in ("self", "cls"))
            long = (node.end_lineno or 0) - node.lineno + 1 > LINES_MAX
            command = place.startswith("vllm_tap/cli/") and bool(node.decorator_list)
            if not command and (long or count > PARAMETERS_MAX):
                found.add(f"{place}:{name}")
    assert found == OPTION_LISTS


def test_only_the_seams_touch_vllm_inside_the_engine() -> None:
    wrong = [str(path.relative_to(ROOT)) for path in (ROOT / "engine_side").rglob("*.py")
             if "seams" not in path.parts and any(name.split(".")[0] == "vllm" for name in imports(path))]
    assert wrong == []


def test_schemas_and_readers_need_no_torch() -> None:
    wrong = [str(path.relative_to(ROOT)) for package in ("schemas", "writer_service", "api")
             for path in (ROOT / package).rglob("*.py")
             if any(name.split(".")[0] in ("torch", "vllm", "transformers") for name in imports(path))]
    assert wrong == []


def test_nothing_is_ever_unpickled() -> None:
    wrong = []
    for path in [path for path in tracked() if path.suffix == ".py"]:
        if any(name.split(".")[0] in ("pickle", "cPickle", "dill", "cloudpickle", "shelve") for name in imports(path)):
            wrong.append(f"{path}: imports a pickle")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant)
                if node.value.value is not False:
                    wrong.append(f"{path}:{node.value.lineno}: allow_pickle")
    assert wrong == []


def test_tests_use_real_parts() -> None:
    wrong = [str(path) for path in (ROOT / "tests").rglob("*.py")
             if any(name.startswith(("unittest.mock", "mock")) for name in imports(path))]
    assert wrong == []


def test_no_test_depends_on_how_fast_the_machine_is() -> None:
    """What has to come is waited for as long as PATIENCE_S says; a short limit is for what must not come."""
    wrong = []
    for path in (ROOT / "tests").rglob("*.py"):
        if "compose" in path.name or path.name == "test_strace.py":  # builds; a stop that a fault may hold up for ever
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg in ("timeout", "timeout_s") and isinstance(
                    node.value, ast.Constant) and 10 < (node.value.value or 0) < PATIENCE_S:
                wrong.append(f"{path}:{node.value.lineno}: {node.arg}={node.value.value}")
    assert wrong == []


def test_public_names_are_listed_sorted_and_there() -> None:
    for module in [importlib.import_module(name) for name in ("vllm_tap", "schemas.errors", "schemas.sites")]:
        assert list(module.__all__) == sorted(module.__all__), module
        for name in module.__all__:
            assert getattr(module, name) is not None


def test_entry_points_lead_somewhere() -> None:
    named = project()["project"]
    for target in [*named["scripts"].values(), *(target for group in named["entry-points"].values()
                                                 for target in group.values())]:
        module, _, attribute = target.partition(":")
        assert callable(getattr(importlib.import_module(module), attribute))


# ── locks ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_the_lock_has_every_direct_dependency_and_no_machine_in_it(engine: str) -> None:
    lock = (ROOT / "requirements" / f"{engine}.lock").read_text()
    pinned = {line.partition("==")[0].lower() for line in lock.splitlines() if "==" in line}
    named = project()["project"]
    extras = named["optional-dependencies"]
    for requirement in [*named["dependencies"], *extras[engine], *extras["demo"], *extras["test"], *extras["dev"]]:
        assert re.split(r"[<>=!~\[; ]", requirement)[0].lower() in pinned, requirement
    assert not re.search(r"://|@ |find-links|index-url|file:", lock)
    assert engine == "gpu" or not pinned & {"torchvision", "torchaudio", "torchcodec"}


@pytest.mark.parametrize("name", ["lens", "page"])
def test_a_lock_of_its_own_pins_what_is_asked_for(name: str) -> None:
    """And of what the tests' environment has already, the same versions, where it is installed beside it."""
    pins = {engine: dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements" / f"{engine}.lock").read_text(), re.M))
            for engine in (name, "cpu")}
    asked = re.findall(r"^([\w.-]+)[<>=]", (ROOT / "requirements" / f"{name}.in").read_text(), re.M)
    assert asked and set(asked) <= pins[name].keys()
    assert name == "lens" or all(pins["cpu"].get(package, version) == version
                                 for package, version in pins["page"].items())


def test_a_clone_whose_path_has_a_space_is_not_set_up(tmp_path: Path) -> None:
    """vLLM would not start there on a CPU: torch's compiler does not quote paths."""
    clone = tmp_path / "my clone"
    for name in ("Makefile", "pyproject.toml", "requirements/cpu.lock"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    done = subprocess.run(["make", "setup"], cwd=clone, capture_output=True, text=True, check=False)
    assert done.returncode and "a folder with a space in its name" in done.stdout and str(clone) in done.stdout
    assert not (clone / ".uv").exists() and not (clone / ".venv").exists()


# ── documents ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_make_target_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        for named in re.findall(r"`make ([a-z-]+)", text) + re.findall(r"^make ([a-z-]+)", text, re.MULTILINE):
            assert named in targets, f"{document}: make {named}"
    assert {"setup", "fix", "check", "test", "demo", "bench", "help"} <= targets


def test_every_command_and_flag_that_is_named_exists() -> None:
    known = {name: {flag for each in (command, *getattr(command, "commands", {}).values())
                    for param in each.params for flag in param.opts}
             for name, command in typer.main.get_command(app).commands.items()}  # type: ignore[attr-defined]
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        named = re.findall(r"(?:`|^|\| )vllm-tap ([^`\n]*)", text, re.MULTILINE)
        for line in named:
            command, *rest = line.split()
            assert command in known, f"{document}: vllm-tap {command}"
            for word in rest:
                if word == "--":
                    break
                if word.startswith("--"):
                    assert word.partition("=")[0] in known[command], f"{document}: vllm-tap {command} {word}"
    assert {"serve", "capture", "ls", "show", "export", "version"} <= set(known)


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / document).read_text()):
            if "://" not in link:
                assert ((ROOT / document).parent / link).exists(), f"{document}: {link}"


def test_the_folder_map_names_every_folder() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for package in (*PACKAGES, "tests", "docs", "requirements"):
        assert f"`{package}/`" in text


def test_the_readme_can_be_run_as_it_stands() -> None:
    page = "docs/tutorials/first-capture.md"
    assert len(blocks("pycon")) == 1 and commands()[0] == "make setup" and len(blocks("python", page)) >= 4
    for block in blocks("python", page):
        compile(block, page, "exec")
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


# ── nothing of any machine ──────────────────────────────────────────────────────────────────────────────────────

HOSTS_ALLOWED = (
    "127.0.0.1", "localhost", "[::1]", "github.com/vllm-project/vllm", "github.com/ulid/spec", "www.apache.org",
    "github.com/ggml-org/llama.cpp",
    "transformerlensorg.github.io", "docs.vllm.ai", "www.w3.org",
    "zarr.dev", "zarr-specs.readthedocs.io", "json-schema.org",
)


def test_no_file_names_a_machine() -> None:
    wrong = []
    for path in tracked():
        if path.name == "LICENSE" or path.suffix in (".png", ".npz", ".bin", ".zip"):
            continue
        text = path.read_text(errors="replace")
        name = str(path.relative_to(ROOT))
        if name != "tests/repository/test_repository.py":
            wrong += [f"{name}: {found}" for found in re.findall(r"(?<![\w.])/(?:root|work|opt|home)/[\w.-]+", text)]
        for url in re.findall(r"https?://([^\s\"'`<>)]+)", text):
            torch_index = name in ("Makefile", "docker/Dockerfile") and url.startswith("download.pytorch.org/")
            if not url.startswith(HOSTS_ALLOWED) and not torch_index and url[0] not in "{$%" and "." in url:
                wrong.append(f"{name}: {url}")
    assert wrong == []
