"""Leftovers of web pages in copied chats: tags, entities, `Copy code`, page counters.

Code is not touched: what stands in fences or between backticks may be about HTML.
"""

from __future__ import annotations

import html
import re

# a fence that is never closed reaches to the end
_CODE = re.compile(
    r"^[ \t]*(`{3,}|~{3,}).*?(?:^[ \t]*\1|\Z)|(?P<tick>`+)[^`\n]+(?P=tick)", re.M | re.S
)
_TAG = re.compile(r"<(/?)(div|span|p|br)(?:\s[^<>`]*|/)?>", re.IGNORECASE)
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,30});")
_LIVE = re.compile(r"<(?=/?(?:div|span|p|br)[\s/>])", re.IGNORECASE)
# on a web page the button stands between a block's language and its code
_BUTTON_IN_FENCE = re.compile(r"^([ \t]*`{3,})[ \t]*\n?[ \t]*([\w+#.-]*)Copy code[ \t]*\n?", re.M)
_BUTTON = re.compile(r"^[ \t]*Copy code[ \t]*(?:\n|\Z)", re.M)
_COUNTER = re.compile(r"^[ \t]*\d{1,4} / \d{1,4}[ \t]*(?:\n|\Z)", re.M)


def strip_html(text: str) -> str:
    """The text without the leftovers; applying it again changes nothing.

    `<br>` and closing `</p>` and `</div>` become line ends. Entities are replaced only beside such
    tags, since without them they are more likely meant; one that would spell a tag stays.
    """
    if not (_TAG.search(text) or "Copy code" in text or _COUNTER.search(text)):
        return text  # looking for code is slow
    while (stripped := _pass(text)) != text:
        text = stripped
    return text


def _pass(text: str) -> str:
    text = _BUTTON_IN_FENCE.sub(r"\1\2\n", text)
    parts, end = [], 0
    for code in _CODE.finditer(text):
        parts += [_prose(text[end : code.start()]), code.group()]
        end = code.end()
    return "".join([*parts, _prose(text[end:])])


def _prose(text: str) -> str:
    bare, found = _TAG.subn(_replacement, text)
    if found:
        bare = _LIVE.sub("&lt;", _ENTITY.sub(lambda match: html.unescape(match.group()), bare))
    return _COUNTER.sub("", _BUTTON.sub("", bare))


def _replacement(tag: re.Match[str]) -> str:
    closing, name = tag.groups()
    return "\n" if name.lower() == "br" or (closing and name.lower() in ("p", "div")) else ""
