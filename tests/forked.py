"""The process that `forked` of conftest.py begins: `python -m WORDS` with everything imported
already. Run as a script by a fork server, which hands over `GIVEN`.
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    given = globals()["GIVEN"]
    os.chdir(given["folder"])
    os.environ.clear()
    os.environ.update(given["environment"])
    for place, stream in zip(given["output"], (sys.stdout, sys.stderr), strict=True):
        file = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream.fileno())
        os.close(file)
    sys.argv = given["words"]
    sys.modules.pop(sys.argv[0], None)  # runpy would warn that it is there
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
