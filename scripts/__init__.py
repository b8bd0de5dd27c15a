"""One thin file per command; `cli` finds them by name."""

import sys
from pathlib import Path

# `python -m draftsmith.scripts.x` (and torchrun -m) in the checkout puts the checkout on the path,
# where its `kernels` would stand in for Hugging Face's package of that name. Installed, draftsmith
# needs no such entry.
_ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _ROOT]
