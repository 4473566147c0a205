"""HTML left over from web scrapes turned into plain text; HTML that a conversation is about stays as it is."""

import html
import re
from collections.abc import Callable
from html.parser import HTMLParser

_TAG = re.compile(r"</?([A-Za-z][A-Za-z0-9]*)\b[^<>]*>")
_BREAK = re.compile(r"[ \t]*<br\s*/?>[ \t]*", re.IGNORECASE)
_ENTITY = re.compile(r"&(?:lt|gt|amp|quot|apos|#39|#x27);")
_FENCED = re.compile(r"(```.*?(?:```|\Z)|`[^`\n]*`)", re.DOTALL)
_STARTS_BLOCK = re.compile(r"\s*<(?:div|p|ol|ul|pre|table|h[1-6]|span)\b", re.IGNORECASE)
_ENDS_BLOCK = re.compile(r"</(?:div|p|ol|ul|pre|table|h[1-6]|span)>\s*\Z", re.IGNORECASE)
_HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
_BLOCK_TAGS = frozenset({"blockquote", "div", "hr", "ol", "p", "pre", "table", "tr", "ul"} | _HEADINGS)
_INLINE_TAGS = {"a", "b", "br", "button", "code", "em", "i", "li", "path", "span", "strong", "sub", "sup", "svg", "u"}
_SCRAPE_TAGS = _BLOCK_TAGS | _INLINE_TAGS | {"tbody", "td", "th", "thead"}


def clean_html(text: str) -> str:
    """The text without scrape left-overs.

    Three cases, all outside of code fences and back-ticks: a text that as a whole is a fragment of formatting HTML
    becomes plain text with lists and code fences; a text whose only tag is `<br>` gets line breaks; a text without tags
    gets its entities (`&lt;` and so on) resolved. Everything else, such as a question about HTML, is returned as it is.
    """
    if "<" not in text and "&" not in text:
        return text
    prose = _FENCED.sub("", text)
    tags = {name.lower() for name in _TAG.findall(prose)}
    if _STARTS_BLOCK.match(text) and _ENDS_BLOCK.search(text) and tags <= _SCRAPE_TAGS:
        return _fragment_to_text(text)
    if tags == {"br"}:
        return _outside_code(text, lambda part: html.unescape(_BREAK.sub("\n", part)))
    if not tags and _ENTITY.search(prose):
        return _outside_code(text, lambda part: _ENTITY.sub(lambda entity: html.unescape(entity[0]), part))
    return text


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    parts = _FENCED.split(text)
    return "".join(part if index % 2 else change(part) for index, part in enumerate(parts))


class _TextBuilder(HTMLParser):
    """Collects the text of a fragment with line breaks, list dashes and code fences."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.in_pre = 0
        self.silent = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("button", "svg"):
            self.silent += 1
        elif tag == "pre":
            self.in_pre += 1
            self.pieces.append("\n```\n")
        elif tag == "code" and not self.in_pre:
            self.pieces.append("`")
        elif tag == "li":
            self.pieces.append("\n- ")
        elif tag == "br" or tag in _BLOCK_TAGS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("button", "svg"):
            self.silent = max(0, self.silent - 1)
        elif tag == "pre":
            self.in_pre = max(0, self.in_pre - 1)
            self.pieces.append("\n```\n")
        elif tag == "code" and not self.in_pre:
            self.pieces.append("`")
        elif tag in _BLOCK_TAGS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.silent:
            self.pieces.append(data)


def _fragment_to_text(fragment: str) -> str:
    builder = _TextBuilder()
    builder.feed(fragment)
    builder.close()
    text = "".join(builder.pieces)
    text = re.sub(r"```\n\n+", "```\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()
