"""This project's entry points as an installation of it would have them, whatever is installed here."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]


def entry_points(folder: Path) -> Path:
    """A folder below ``folder`` for PYTHONPATH; what pyproject.toml says now counts, not what it said at the setup."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "site" / f"vllm_tap-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-tap\nVersion: {project['version']}\n")
    (info / "entry_points.txt").write_text("".join(
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in points.items())
        for group, points in project["entry-points"].items()))
    return info.parent
