"""Ops, each defined once in plain PyTorch; the fast forms are tested against the definitions."""

if __name__ == "kernels":
    raise ImportError(
        "the draftsmith checkout shadows the package `kernels`: run with PYTHONSAFEPATH=1"
    )
