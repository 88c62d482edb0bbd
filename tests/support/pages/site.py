"""The site of docs/: ``python -m tests.support.pages.site`` builds it into build/site, and stops at anything doubtful.

Dead links, anchors that are not there and references to unknown names end the build (``--strict``); so do pages that
are not in the navigation. Beside the pages lies ``llms.txt``: all of them as one text, in the order of the navigation.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
CONFIG: Final = ROOT / "mkdocs.yml"
BUILDER: Final = Path(sys.executable).with_name("zensical")
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")


class SiteError(Exception):
    """A site that is not to be published; the message is what the builder says."""


def pages() -> list[str]:
    """The pages of the navigation, relative to docs/, in order."""
    nav = CONFIG.read_text().partition("\nnav:\n")[2]
    return re.findall(r": (\S+\.md)$", nav, re.MULTILINE)


def build(project: Path = ROOT) -> str:
    """Build the project's site below ``build/site``; what the builder said. SiteError where anything is wrong."""
    unlisted = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} ^ set(pages())
    if unlisted:
        raise SiteError(f"in docs/ or in the navigation of mkdocs.yml alone: {', '.join(sorted(unlisted))}")
    done = subprocess.run([str(BUILDER), "build", "--strict", "--clean"], cwd=project, capture_output=True, text=True)
    said = _COLOURS.sub("", done.stdout + done.stderr)
    if done.returncode != 0:
        raise SiteError(said)
    text = "\n\n".join((project / "docs" / page).read_text() for page in pages())
    (project / "build" / "site" / "llms.txt").write_text(text)
    return said


def copy_to(folder: Path) -> Path:
    """A project with the same pages, built apart from this one; its API reference is read from this one's code."""
    shutil.copytree(ROOT / "docs", folder / "docs")
    (folder / "mkdocs.yml").write_text(CONFIG.read_text().replace("paths: [.]", f"paths: [{ROOT}]"))
    return folder


def main() -> int:
    try:
        print(build())
    except SiteError as error:
        print(error, file=sys.stderr)
        return 1
    print("build/site: python -m http.server --directory build/site 8200")
    return 0


if __name__ == "__main__":
    sys.exit(main())
