"""The least time that each op can take on a card: bytes over bandwidth or arithmetic over its peak,
whichever is longer.

Bytes count every input read once and every output written once, in the dtypes of a run (bfloat16
states, keys and logits of training; float32 probabilities). Work counts multiplications and
additions of matrix products for attention and an estimate a value for the rest. Both are lower
bounds: a launch, an imperfect cache and the tails of a grid come on top.

    python -m draftsmith.scripts.roofline [docs/kernels.md]     prints the table, or renews the page
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from ..models.files import atomic_write_bytes
from .aot import SIZES, Size, renewed

MARKS = "roofline"


@dataclass(frozen=True)
class Card:
    """Peaks of a card's data sheet: bytes a second, dense bfloat16 and float32 operations a
    second."""

    name: str
    bandwidth: float
    matrix: float
    vector: float


CARDS = (
    Card("H100 SXM", 3.35e12, 989e12, 67e12),
    Card("H200", 4.8e12, 989e12, 67e12),
)


@dataclass(frozen=True)
class Work:
    """One op on one workload.

    Attributes:
        bytes, operations: formulae over the model's H (hidden), Q and G (query and key heads), D
            and E (key and value width), V (vocabulary) and the workload's own numbers.
        matrix: whether the operations are matrix products.
    """

    op: str
    workload: str
    numbers: dict[str, int]
    bytes: str
    operations: str
    matrix: bool = False

    def amounts(self, size: Size) -> tuple[int, int]:
        """(bytes, operations) at a model's widths."""
        names = self.numbers | {
            "H": size.hidden,
            "Q": size.heads,
            "G": size.key_heads,
            "D": size.key_width,
            "E": size.value_width,
            "V": size.vocabulary,
        }
        # The formulae are this file's own constants; as text they stand in the page as computed.
        found = [
            int(eval(text, {"__builtins__": {}}, names)) for text in (self.bytes, self.operations)
        ]
        return found[0], found[1]


TRAIN, BATCH = {"N": 4096}, {"B": 64, "K": 3}
WORKS = (
    Work("norm_concat, forward", "N=4096 rows", TRAIN, "8*N*H", "10*N*H"),
    Work("norm_concat, backward", "N=4096 rows", TRAIN, "12*N*H", "24*N*H"),
    Work("add_norm, forward", "N=4096 rows", TRAIN, "8*N*H", "6*N*H"),
    Work("add_norm, backward", "N=4096 rows", TRAIN, "8*N*H", "13*N*H"),
    Work("rms_norm", "N=256 rows", {"N": 256}, "4*N*H", "5*N*H"),
    Work("shift_insert", "N=256 rows", {"N": 256}, "16*N", "2*N"),
    Work("place_rows", "B=64, K+1=4 rows each", BATCH, "20*B*(K+1)", "4*B*(K+1)"),
    Work("kv_append", "N=256 rows", {"N": 256}, "4*N*G*(D+E)", "0"),
    Work("copy_pages", "P=8 pages of 16, keys and values", {"P": 8}, "4*P*16*G*(D+E)", "0"),
    Work("compact_paths", "B=64, K=3 rows each, keys and values", BATCH, "4*B*K*G*(D+E)", "0"),
    Work(
        "paged_attention, decode",
        "B=64, L=4096 keys",
        {"B": 64, "L": 4096},
        "2*B*(L*G+Q)*(D+E)",
        "2*B*L*Q*(D+E)",
        True,
    ),
    Work(
        "paged_attention, verify",
        "B=64, R=4 rows each, L=4096 keys",
        {"B": 64, "R": 4, "L": 4096},
        "2*B*(L*G+R*Q)*(D+E)",
        "2*B*R*L*Q*(D+E)",
        True,
    ),
    Work(
        "paged_attention, prompt",
        "N=2048 rows, all keys their own",
        {"N": 2048},
        "2*N*(G+Q)*(D+E)",
        "N*N*Q*(D+E)",
        True,
    ),
    Work("accept_chains, sampled", "B=64, K=3, float32", BATCH, "8*B*V", "4*B*V"),
    Work("renormalise", "B=64 rows, float32", {"B": 64}, "8*B*V", "10*B*V"),
    Work(
        "distill_chunk",
        "M=512 students, T=256 teachers",
        {"M": 512, "T": 256},
        "2*V*(2*M+T)",
        "30*M*V",
    ),
    Work(
        "ttt_attention, forward",
        "N=4096 tokens, one document, causal block",
        TRAIN,
        "2*N*(G+Q)*(D+E)",
        "N*N*Q*(D+E)",
        True,
    ),
    Work(
        "ttt_attention, backward",
        "N=4096 tokens, one document, causal block",
        TRAIN,
        "4*N*(G+Q)*(D+E)",
        "N*N*Q*(3*D+2*E)",
        True,
    ),
)


def floor(work: Work, size: Size, card: Card) -> float:
    """Seconds."""
    moved, operations = work.amounts(size)
    return max(moved / card.bandwidth, operations / (card.matrix if work.matrix else card.vector))


def table() -> str:
    """A Markdown table, one line an op and model; the measured column is empty."""
    lines = [
        "| op | workload | widths of | bytes | MB | operations | Gop | bound by "
        + "".join(f"| {card.name}, µs " for card in CARDS)
        + "| measured |",
        "|" + "---|" * (9 + len(CARDS)),
    ]
    for work in WORKS:
        for index, size in enumerate(SIZES):
            moved, operations = work.amounts(size)
            peak = CARDS[0].matrix if work.matrix else CARDS[0].vector
            bound = "memory" if moved / CARDS[0].bandwidth >= operations / peak else "arithmetic"
            head = (
                [f"`{work.op}`", work.workload, size.name, f"`{work.bytes}`"]
                if index == 0
                else ["", "", size.name, ""]
            )
            formula = f"`{work.operations}`" if index == 0 else ""
            times = [f"{1e6 * floor(work, size, card):.3g}" for card in CARDS]
            cells = [*head, f"{moved / 1e6:.4g}", formula, f"{operations / 1e9:.4g}", bound, *times]
            lines.append("| " + " | ".join(cells) + " | |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the table, or renew it in the page that is named."""
    text = table()
    if arguments:
        page = Path(arguments[0])
        atomic_write_bytes(page, renewed(page.read_text(), MARKS, text).encode())
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
