"""Pages of reports: one HTML file with its pictures and films inside, which needs no script and no network."""

import base64
import html
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canter.utils.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Text stays text, so that a drawing is small and can be searched.
SVG_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "canter",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
}
_STYLE = """
:root{color-scheme:light}
body{font:15px/1.5 system-ui,"DejaVu Sans",sans-serif;color:#1c2430;background:#f5f6f8;margin:0}
main{max-width:1080px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:28px;margin:0 0 4px}h2{font-size:19px;margin:0 0 4px}
section{background:#fff;border:1px solid #e2e5ea;border-radius:10px;padding:20px 24px;margin-top:20px;overflow-x:auto}
p{margin:4px 0 12px;color:#525c69;max-width:75ch}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;width:100%}
th{text-align:right;color:#525c69;font-weight:600;border-bottom:2px solid #d6dae1;padding:5px 10px}
td{text-align:right;border-bottom:1px solid #eceef2;padding:5px 10px;white-space:nowrap}
th:first-child,td:first-child{text-align:left;padding-left:0}
td:first-child{white-space:normal;min-width:9em}
svg{width:100%;height:auto}
i.dot{display:inline-block;width:10px;height:10px;border-radius:50%;margin-right:8px}
figure{display:inline-block;margin:8px 16px 8px 0;vertical-align:top}figcaption{color:#525c69;font-size:13px}
video,img{max-width:320px;border-radius:6px;border:1px solid #e2e5ea;display:block}
"""


class Page:
    """A report that is written from top to bottom."""

    def __init__(self, title: str, subtitle: str) -> None:
        self.title = title
        self.parts = [f"<header><h1>{html.escape(title)}</h1><p>{html.escape(subtitle)}</p></header>"]
        self.is_open = False

    def section(self, title: str, text: str = "") -> None:
        """Begin a section."""
        self.parts.append(f"{'</section>' if self.is_open else ''}<section><h2>{html.escape(title)}</h2>")
        self.is_open = True
        if text:
            self.text(text)

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self.parts.append(f"<p>{html.escape(text)}</p>")

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], colors: Sequence[str] = ()) -> None:
        """Add a table; `colors` are dots before the rows, the colours of their lines in the drawings."""
        dots = [f'<i class="dot" style="background:{color}"></i>' for color in colors] or [""] * len(rows)
        cells = [
            "".join(f"<td>{dot if i == 0 else ''}{html.escape(cell)}</td>" for i, cell in enumerate(row))
            for row, dot in zip(rows, dots, strict=True)
        ]
        top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        self.parts.append(f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>")

    def drawing(self, figure: "Figure", description: str) -> None:
        """Add a figure of matplotlib, as SVG."""
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        svg = file.getvalue()
        svg = svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{html.escape(description)}"', 1)
        # Names inside an SVG are names of the whole page.
        prefix = f"d{len(self.parts)}-"
        self.parts.append(re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", svg))

    def medium(self, path: Path, content: bytes, caption: str) -> None:
        """Add a picture or a film, the content of a file of that name."""
        kind = {".mp4": "video/mp4", ".gif": "image/gif", ".png": "image/png"}[path.suffix]
        data = f"data:{kind};base64,{base64.b64encode(content).decode()}"
        text = html.escape(caption)
        element = f'<img alt="{text}" src="{data}">'
        if kind.startswith("video"):
            element = f'<video controls loop muted src="{data}"></video>'
        self.parts.append(f"<figure>{element}<figcaption>{text}</figcaption></figure>")

    def write(self, path: Path) -> None:
        """Write the page."""
        body = "\n".join(self.parts) + ("</section>" if self.is_open else "")
        head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        head += f"<title>{html.escape(self.title)}</title><style>{_STYLE}</style>"
        text = f'<!doctype html><html lang="en"><head>{head}</head><body><main>{body}</main></body></html>\n'
        atomic_write(path, text.encode())
