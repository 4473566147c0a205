"""Scrape left-overs become text; HTML as a subject stays."""

import pytest

from lasd.conversations.html_text import clean_html


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("plain & simple, 3 < 4", "plain & simple, 3 < 4"),
        ("one<br>two<br />three", "one\ntwo\nthree"),
        ("if a &lt; b &amp;&amp; c", "if a < b && c"),
        ("<p>Hello</p><p>there</p>", "Hello\n\nthere"),
        ("<div class='markdown prose'><ol><li>first</li><li>second</li></ol></div>", "- first\n- second"),
        (
            "<div><p>Use:</p><pre><code>a &lt; b\n  c</code></pre></div>",
            "Use:\n\n```\na < b\n  c\n```",
        ),
        ("<div><button>Copy code</button><code>x</code></div>", "`x`"),
    ],
)
def test_left_overs_become_text(html: str, text: str) -> None:
    assert clean_html(html) == text


@pytest.mark.parametrize(
    "text",
    [
        "Convert this HTML into Markdown: <code>Use `code`</code>",
        "<html><body><form action='x'></form></body></html>",
        "What does `&lt;` mean?",
        "Fix it:\n```html\n<br>\n```",
        "Use <br> or <p> here?",
        "vector<int> v; a && b",
    ],
)
def test_html_that_is_the_subject_stays(text: str) -> None:
    assert clean_html(text) == text
