"""Packages put where Python finds them without an installer: a folder on the path, with what it would write there."""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOY_CODEC = ROOT / "tests" / "support" / "toy_codec"


def install(project: Path, target: Path) -> None:
    """The packages of a project's folder into ``target``, with the entry points that its pyproject.toml names."""
    said = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    for package in project.iterdir():
        if (package / "__init__.py").exists():
            shutil.copytree(package, target / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    install_entry_points(target, said["name"], said["entry-points"])


def install_entry_points(target: Path, name: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    """What says that a distribution is installed in ``target``, and which entry points it has."""
    info = target / f"{name.replace('-', '_')}-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("".join(
        f"[{group}]\n" + "".join(f"{point} = {value}\n" for point, value in points.items())
        for group, points in groups.items()))


def environment(*targets: Path) -> dict[str, str]:
    """The variables of a process that finds this project, and the packages in ``targets``."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*targets, ROOT / "tests/support/start", ROOT)))}
