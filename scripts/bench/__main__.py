"""`make bench`: one bench after another, each in a process of its own, then one table.

Each writes its JSON to work/bench/NAME.json; the table shows the ratios in it: the entries of
a list `ratios` (what, ratio, against), or else every number with a ratio in its place's names; of a
row in a list the place is its `what`, or its number. A bench that fails is
named, and the rest go on. Left out, by hand: doctor and families (need trained heads), peers (needs
the other trainers installed) and soak (proves, and times nothing).

    python -m draftsmith.scripts.bench [NAME …]
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...models.files import atomic_write_json, read_json

FOLDER = Path("work") / "bench"
BY_HAND = ("doctor", "families", "peers", "soak")
ARGUMENTS = {"long_context": ["lengths=4096", "steps=3", "out={out}"]}
"""Where others than `OUT.json` are wanted."""


def names() -> list[str]:
    """Every bench that `make bench` runs."""
    found = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    return [name for name in found if name not in BY_HAND]


def ratios(value: Any, path: str = "") -> Iterator[tuple[str, float, str]]:
    """(what, ratio, against) of a bench's JSON."""
    if isinstance(value, dict) and isinstance(value.get("ratios"), list):
        yield from ((one["what"], one["ratio"], one["against"]) for one in value["ratios"])
        return
    if isinstance(value, dict):
        inner = value.items()
    else:
        inner = ((each.get("what", number), each) for number, each in enumerate(value))
    for name, found in inner:
        place = f"{path} {name}".strip()
        if isinstance(found, (dict, list)):
            if not isinstance(found, list) or all(isinstance(each, dict) for each in found):
                yield from ratios(found, place)
        elif isinstance(found, (int, float)) and "ratio" in place:
            what, _, against = place.replace("_", " ").partition(" to ")
            yield what, float(found), against


def main(arguments: list[str]) -> int:
    """Run them all, or those that are named; 1 where any failed."""
    if unknown := set(arguments) - {*names(), *BY_HAND}:
        print(f"no bench {', '.join(sorted(unknown))}; there are {', '.join(names())}")
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {}
    for name in arguments or names():
        print(f"== {name}", flush=True)
        out = FOLDER / f"{name}.json"
        out.unlink(missing_ok=True)
        given = [word.format(out=out) for word in ARGUMENTS.get(name, ["{out}"])]
        began = time.perf_counter()
        command = [sys.executable, "-m", f"{__package__}.{name}", *given]
        code = subprocess.run(command, check=False).returncode
        summary[name] = {"seconds": time.perf_counter() - began, "code": code}
        if code == 0:
            summary[name]["ratios"] = list(ratios(read_json(out)))
    atomic_write_json(FOLDER / "summary.json", summary)
    print(f"\n{'bench':<14}{'seconds':>8}  {'ratio':>8}  what, against what")
    for name, found in summary.items():
        begin = f"{name:<14}{found['seconds']:>8.0f}  "
        for what, ratio, against in found.get("ratios", [("failed", float("nan"), "")]):
            print(f"{begin}{ratio:>8.2f}  {what}{f' / {against}' if against else ''}")
            begin = " " * 24
    print(f"{sum(found['seconds'] for found in summary.values()):>22.0f} s in all; {FOLDER}")
    return int(any(found["code"] for found in summary.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
