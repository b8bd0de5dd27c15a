"""Leftovers of web pages in copied chats: tags, entities, `Copy code`, page counters.

Code is not touched: what stands in fences or between backticks may be about HTML.
"""

from __future__ import annotations

import html
import re

# fences, one that is never closed reaching to the end, and what stands between equal backticks
_CODE = re.compile(
    r"^[ \t]*(`{3,}|~{3,}).*?(?:^[ \t]*\1|\Z)|(?<!`)(?P<tick>`+)(?!`)[^\n]+?(?<!`)(?P=tick)(?!`)",
    re.MULTILINE | re.DOTALL,
)
_NAMES = "(?:div|span|p|br)"
_TAG = re.compile(rf"<(/?)({_NAMES})(?:\s[^<>`]*|/)?>", re.IGNORECASE)
_REST_OF_TAG = re.compile(rf"/?{_NAMES}[\s/>&]", re.IGNORECASE)
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,30});")
# on a web page the button stands between a block's language and its code
_BUTTON_IN_FENCE = re.compile(
    r"([ \t]*`{3,})[ \t]*([\w+#.-]*)[ \t]*\n?[ \t]*([\w+#.-]*?)Copy code[ \t]*\n?"
)
_BUTTON = re.compile(r"^[ \t]*Copy code[ \t]*(?:\n|\Z)", re.MULTILINE)
_COUNTER = re.compile(r"^[ \t]*\d{1,4} / \d{1,4}[ \t]*(?:\n|\Z)", re.MULTILINE)


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
    parts, end = [], 0
    for code in _CODE.finditer(text):
        block = code.group()
        if button := _BUTTON_IN_FENCE.match(block):
            fence, language, same = button.groups()
            block = f"{fence}{language or same}\n{block[button.end() :]}"
        parts += [_prose(text[end : code.start()]), block]
        end = code.end()
    return "".join([*parts, _prose(text[end:])])


def _prose(text: str) -> str:
    bare, found = _TAG.subn(_line_end, text)
    if found:
        bare = _ENTITY.sub(_character, bare)
    return _COUNTER.sub("", _BUTTON.sub("", bare))


def _line_end(tag: re.Match[str]) -> str:
    closing, name = tag.groups()
    return "\n" if name.lower() == "br" or (closing and name.lower() in ("p", "div")) else ""


def _character(entity: re.Match[str]) -> str:
    character = html.unescape(entity.group())
    if character == "<" and _REST_OF_TAG.match(entity.string, entity.end()):
        return entity.group()
    return character
