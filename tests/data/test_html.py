"""Leftovers of web pages go, code and meaning stay."""

from __future__ import annotations

import pytest

from draftsmith.data.html import strip_html


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<p>one</p><p>two</p>", "one\ntwo\n"),
        ('a<br>b<br/>c<BR />d<div class="x">e</div>', "a\nb\nc\nde\n"),
        ("<span style='a'>tea &amp; milk</span> &copy;", "tea & milk \xa9"),
        ("R&amp;D &lt;3", "R&amp;D &lt;3"),
        ("<p>write &lt;div&gt; and &lt;b&gt;</p>", "write &lt;div> and <b>\n"),
        ("x <b>bold</b> if a < b and c > d <people>", "x <b>bold</b> if a < b and c > d <people>"),
        ("use `<br>` or ``a ` <p>``, <br>so", "use `<br>` or ``a ` <p>``, \nso"),
        ("<br>\n```html\n<div>&amp;</div>\n```\n<p>x", "\n\n```html\n<div>&amp;</div>\n```\nx"),
        ("```\n<div>never closed", "```\n<div>never closed"),
        ("~~~\n<p>\n~~~\n<p>", "~~~\n<p>\n~~~\n"),
        ("```python\nCopy code\nprint()\n```", "```python\nprint()\n```"),
        ("```\npythonCopy code\nprint()\n```", "```python\nprint()\n```"),
        ("so:\n\nCopy code\nx = 1", "so:\n\nx = 1"),
        ("press Copy code to copy", "press Copy code to copy"),
        ("one\n 1 / 2 \ntwo", "one\ntwo"),
        ("2 / 2", ""),
        ("1 / 2 of them\nit is 1 / 2", "1 / 2 of them\nit is 1 / 2"),
        ("<di<span>v>x</div>", "x\n"),
        ("``<br>` x", "``\n` x"),
        ("<p>&amp;lt;br&amp;gt;</p>", "&lt;br&gt;\n"),
        ("<p>&#60;p&#62;", "&#60;p>"),
    ],
)
def test_strip(text: str, expected: str) -> None:
    """Case 57: the four tags, entities beside them, buttons and counters; done twice, the same."""
    assert strip_html(text) == expected
    assert strip_html(expected) == expected
