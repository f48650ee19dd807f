"""Small pieces of HTML; every argument called `text` or `rows` is escaped, `inner` is markup."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

_SCRIPT = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
_SCRIPT_HASH = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()


def section(heading: str, lead: str, inner: str) -> str:
    """A section of the page under its heading, with one sentence that says what is shown."""
    return f'<section><h2>{escape(heading)}</h2><p class="lead">{escape(lead)}</p>{inner}</section>'


def card(inner: str, heading: str = "") -> str:
    """A framed box."""
    title = f"<h3>{escape(heading)}</h3>" if heading else ""
    return f'<div class="card">{title}{inner}</div>'


def grid(cards: Iterable[str]) -> str:
    """Cards side by side, in one column on a phone."""
    return f'<div class="grid">{"".join(cards)}</div>'


def absent(text: str) -> str:
    """Says in the place of a picture why there is none."""
    return f'<p class="absent">{escape(text)}</p>'


def notes(rows: Iterable[str]) -> str:
    """Remarks that must not be overlooked."""
    return "".join(f'<p class="note">{escape(row)}</p>' for row in rows)


def legend(rows: Iterable[Sequence[str]]) -> str:
    """Keys of a picture: (shape classes, CSS colour variable, text)."""
    items = []
    for shape, colour, text in rows:
        paint = "border-color" if "stroke" in shape else "background"
        mark = f'<i class="{shape}" style="{paint}:var(--{colour})"></i>'
        items.append(f"<li>{mark}{escape(text)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def link(target: str, text: str) -> str:
    """A text that leads to a place on the page or in a file beside it; plain without a target."""
    return f'<a href="{escape(target)}">{escape(text)}</a>' if target else escape(text)


def tile(
    name: str, value: str, more: str, unit: str = "", colour: str = "", target: str = ""
) -> str:
    """One headline number, which leads to `target`."""
    key = f'<i class="key" style="background:var(--{colour})"></i>' if colour else ""
    small = f" <small>{escape(unit)}</small>" if unit else ""
    return (
        f'<div class="tile"><div class="name">{key}{escape(name)}</div>'
        f'<div class="value">{link(target, value)}{small}</div>'
        f'<div class="more">{escape(more)}</div></div>'
    )


def empty_tile(name: str, text: str) -> str:
    """A headline number that this recipe does not produce."""
    return (
        f'<div class="tile"><div class="name">{escape(name)}</div>'
        f'<div class="value none">{escape(text)}</div></div>'
    )


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A plain table; the first cell of a row is its header."""
    columns = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll"><table>{title}<thead><tr>{columns}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values below each other."""
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in rows
    )
    return f'<table class="facts"><tbody>{body}</tbody></table>'


def details(heading: str, inner: str, name: str = "") -> str:
    """A section that opens on a click, or by a link to `name`; print shows it open."""
    own = f' id="{escape(name)}"' if name else ""
    return f'<details class="card"{own}><summary>{escape(heading)}</summary>{inner}</details>'


def filtered(task: str = "", length: str = "") -> str:
    """Attributes of what the page's filter shows only for its task or length."""
    named = {"task": task, "length": length}
    return "".join(f' data-{name}="{escape(text)}"' for name, text in named.items() if text)


def filter_bar(choices: Mapping[str, Sequence[str]]) -> str:
    """Menus for what `filtered` names, each with its choices; hidden where scripts do not run."""
    menus = []
    for name, texts in choices.items():
        if len(texts) > 1:
            options = "".join(f"<option>{escape(text)}</option>" for text in texts)
            menus.append(
                f'<label>{escape(name)} <select name="{escape(name)}"><option value="">all</option>'
                f"{options}</select></label>"
            )
    return f'<form class="filter card" hidden>{"".join(menus)}</form>' if menus else ""


def page(title: str, style: str, header: str, body: str, footer: str) -> str:
    """The whole document; its policy forbids all but what it holds, the one script included."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        f"content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{_SCRIPT_HASH}'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f"<body><main><header>{header}</header>{body}<footer>{escape(footer)}</footer>"
        f"</main><script>{_SCRIPT}</script></body></html>\n"
    )
