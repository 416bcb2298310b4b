"""Tables as HTML for Jupyter: plain text in, escaped and readable on light and dark pages. No other markup."""

from __future__ import annotations

import html
from collections.abc import Sequence

# Okabe and Ito's colours, mixed with white so that black text stays legible on them.
COLOURS = ("#a6d5f2", "#f7dfa5", "#a5dbc8", "#f0c3a4", "#eed5e3", "#f9f5b8", "#a3c9e2", "#d9d9d9")
_CELL = "text-align:left;vertical-align:top;padding:2px 8px;border:1px solid #888"


def table_html(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], colours: Sequence[str | None] = ()
) -> str:
    """A table with a caption; every text is escaped, line breaks are kept.

    Args:
        header, rows: texts; every row as long as the header.
        colours: of each row's background; None or nothing leaves it to the page.
    """
    head = "".join(f'<th style="{_CELL}">{_text(name)}</th>' for name in header)
    body = []
    for i, row in enumerate(rows):
        colour = colours[i] if i < len(colours) else None
        style = f"background:{colour};color:#000" if colour else ""
        cells = "".join(f'<td style="{_CELL};{style}">{_text(cell)}</td>' for cell in row)
        body.append(f"<tr>{cells}</tr>")
    caption = f'<caption style="text-align:left;font-weight:bold">{_text(title)}</caption>'
    return (
        f'<table style="border-collapse:collapse">{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table>"
    )


def _text(text: str) -> str:
    return html.escape(text).replace("\n", "<br>")
