"""The toy conversations and the toy target of the data tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_PLACE = Path(__file__).parents[1] / "data" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("toy_conversations", _PLACE)
assert _SPEC is not None and _SPEC.loader is not None
_TOYS = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_TOYS)

chats_file = _TOYS.chats_file
toy_folder = _TOYS.toy_folder
toy_target = _TOYS.toy_target
toy_rows = _TOYS.toy_rows
poisoned = _TOYS.poisoned
