"""Self-contained pages from templates; their security policy forbids loading anything."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from stages.pages.colours import COLOURS
from stages.pages.tables import as_cell

_FOLDER = Path(__file__).parent
_CHECKOUT = _FOLDER.parents[1]


@functools.cache
def library() -> str:
    """The script that draws charts on a page (Vega-Lite, Vega and their embedder)."""
    # Imported by name, since it takes 0.4 s that pages without charts need not spend.
    script: str = importlib.import_module("vl_convert").javascript_bundle()
    return script.replace("</script", "<\\/script")


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


_TEMPLATES = Environment(
    loader=FileSystemLoader(_CHECKOUT),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
_TEMPLATES.filters |= {"sha256": _sha256, "cell": as_cell}


def render(template: str, *, has_charts: bool = True, **content: Any) -> str:
    """The page from the template at a path in the checkout, with this content.

    Every text is escaped. With `has_charts` the page contains the script that draws charts.
    """
    return _TEMPLATES.get_template(template).render(
        has_charts=has_charts,
        library=library() if has_charts else "",
        script=(_FOLDER / "page.js").read_text(encoding="utf-8"),
        style=(_FOLDER / "page.css").read_text(encoding="utf-8"),
        colours=COLOURS,
        **content,
    )
