"""Does `draftsmith doctor` find what is wrong with real work, and only that?

    python -m draftsmith.scripts.bench.doctor OUT [OUT.json] [work=…] [target=…] [tokens=…]

OUT holds the heads that `draftsmith.scripts.results OUT families norms data` trained; further
settings: DEFAULTS. Into copies of a slice of the rows, the states of that slice, four heads and
their logs one fault each is planted, doctor is run on it, and the first check that speaks must be
the one that names it. The same is then asked of what is sound: the slice, every head below OUT and
its log; there any fault is a false alarm.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...models.files import atomic_write_json
from ._planted import HEADS, Bench, Planted, of_rows, of_run, of_states, of_target
from ._planted_heads import of_head

DEFAULTS = {
    "work": "work/comparisons",
    "target": "work/target/smollm2",
    "tokens": "1400",  # of the slice
    "only": "",  # a part of the names of what is planted, or of what is sound
}


def everything(bench: Bench) -> Iterator[Planted]:
    """Every fault, from the target on."""
    for one in (of_target, of_rows, of_states, of_run):
        yield from one(bench)
    for name in HEADS:
        yield from of_head(bench, name)


def sound(bench: Bench) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """What is whole; each fault told of it is a false alarm."""
    yield "the slice", lambda: bench.faults(bench.sound)
    # Of runs that were kept; the short ones try rates at which some do blow up.
    for path in sorted(bench.out.glob("*/head/config.json")):
        head, run = path.parent, path.parent.parent
        yield f"sound: {run.name} head", lambda head=head: bench.head_faults(head)
        yield f"sound: {run.name} log", lambda run=run: bench.run_faults(run)


def main(arguments: list[str]) -> int:
    """Print every fault and what was said of it; 1 where one was missed or an alarm was false."""
    places = [word for word in arguments if "=" not in word]
    asked = DEFAULTS | dict(word.split("=", 1) for word in arguments if "=" in word)
    if not places or asked.keys() != DEFAULTS.keys():
        print(__doc__, f"\nsettings: {DEFAULTS}", file=sys.stderr)
        return 2
    planted: list[dict[str, Any]] = []
    healthy: list[dict[str, Any]] = []
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        bench = Bench(
            Path(places[0]), Path(asked["work"]), Path(asked["target"]), int(asked["tokens"]), root
        )
        chosen = (one for one in everything(bench) if asked["only"] in one.what)
        for number, one in enumerate(chosen):
            place = root / f"fault-{number:03}"
            place.mkdir()
            faults = one.found(place)
            shutil.rmtree(place)
            right = bool(faults) and faults[0] in one.checks
            planted.append({"planted": one.what, "told": faults, "named": right})
            print(f"{'found' if right else 'MISSED':<8}{one.what}: {', '.join(faults)}", flush=True)
        for what, look in sound(bench):
            if asked["only"] not in what:
                continue
            faults = look()
            healthy.append({"sound": what, "told": faults})
            print(f"{'FALSE' if faults else 'ok':<8}{what}: {', '.join(faults)}", flush=True)
    named = sum(one["named"] for one in planted)
    false = sum(bool(one["told"]) for one in healthy)
    print(
        f"{named} of {len(planted)} planted faults named; {false} false alarms on {len(healthy)} "
        f"sound heads, logs and slices; {time.perf_counter() - began:.0f} s"
    )
    if len(places) > 1:
        atomic_write_json(places[1], {"planted": planted, "sound": healthy, "settings": asked})
    return int(named < len(planted) or false > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
