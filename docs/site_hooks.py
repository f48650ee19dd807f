"""Hook of mkdocs.yml: the repository's own pages as pages of the site, and links as they are there.

Pages are written to be read in the repository. What they link outside docs/ is in the site where it
is one of `PAGES`; any other file is named without a link.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# Pages of the repository by their place in the site.
PAGES = {
    "index.md": "README.md",
    "recipes.md": "recipes/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
_KINDS = ("Start", "Guide", "Reference", "Notes")
_LINK = re.compile(r"(!?)\[([^]]*)\]\((?!\w+:|#)([^)#\s]*)(#[^)\s]+)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the repository's own pages."""
    for place, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=text))
    return files


def on_nav(nav: Any, config: Any, files: Files) -> Any:
    """The repository's own pages, then the kinds in the order in which a newcomer reads them."""
    nav.items.sort(key=lambda item: _KINDS.index(item.title) if item.title in _KINDS else -1)
    return nav


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page's text with links that hold in the site."""
    place = page.file.src_uri
    source = posixpath.dirname(PAGES.get(place, f"docs/{place}"))
    places = {path: place for place, path in PAGES.items()}

    def linked(match: re.Match[str]) -> str:
        picture, text, link, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(source, link))
        target = places.get(path) or path.removeprefix("docs/")
        if path in places or (path.startswith("docs/") and files.get_file_from_path(target)):
            relative = posixpath.relpath(target, posixpath.dirname(place) or ".")
            return f"{picture}[{text}]({relative}{anchor or ''})"
        if not os.path.lexists(ROOT / path):
            return match[0]  # which the strict build refuses
        return text

    return _LINK.sub(linked, markdown)
