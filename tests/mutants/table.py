"""Mutants: one sync, order, check or lock taken out each, with the promise that this breaks and the tests that must see
it. They lie in the ``*.toml`` files beside; where files are is said in ``places.toml`` alone.
"""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.support.store_helpers import ROOT

HERE = Path(__file__).parent
FIELDS = {"id", "promise", "old", "new", "tests", "hangs"}


@dataclass(frozen=True)
class Mutant:
    """``old`` stands once in ``file`` and becomes ``new``; then one of ``tests`` (node ids) fails.

    ``hangs``: or it does not end, which is then what was promised not to happen.
    """

    id: str
    file: str
    promise: str
    old: str
    new: str
    tests: tuple[str, ...]
    hangs: bool = False

    @property
    def name(self) -> str:
        """The id without the module."""
        return self.id.partition(": ")[2]

    def mutated(self, tree: Path) -> str:
        """The file with the change; ValueError where it does not apply, or makes no Python."""
        text = (tree / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.id}: its old text stands {count} times in {self.file}, not once; "
                             "change it with the code, or take the mutant out with what it was about")
        made = text.replace(self.old, self.new)
        ast.parse(made, self.file)
        return made


def mutants() -> list[Mutant]:
    """All of them, in the order of the files; ValueError names what is wrong with one."""
    places = tomllib.loads((HERE / "places.toml").read_text())
    found: list[Mutant] = []
    for path in sorted(set(HERE.glob("*.toml")) - {HERE / "places.toml"}):
        for module, entries in tomllib.loads(path.read_text()).items():
            for entry in entries:
                if unknown := set(entry) - FIELDS:
                    raise ValueError(f"{path.name}: {module}: unknown fields {sorted(unknown)}")
                tests = tuple(_node(test, places["tests"]) for test in entry.pop("tests"))
                found.append(Mutant(file=places["files"][module], tests=tests,
                                    **{**entry, "id": f"{module}: {entry['id']}"}))
    ids = [mutant.id for mutant in found]
    if len(set(ids)) < len(ids):
        raise ValueError(f"the same id twice: {sorted(name for name in ids if ids.count(name) > 1)[0]}")
    return found


def _node(test: str, places: dict[str, str]) -> str:
    """``module::test`` with the module's path."""
    module, _, name = test.partition("::")
    return f"{places[module]}::{name}"


def has_test(node: str, tree: Path = ROOT) -> bool:
    """Whether a node's test function is there."""
    path, _, name = node.partition("::")
    wanted = name.partition("[")[0]
    return any(isinstance(item, ast.FunctionDef) and item.name == wanted
               for item in ast.parse((tree / path).read_text()).body)
