"""The report's files: numbers as measured, words where a baseline wins, one HTML file that loads
nothing."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from draftsmith.inference import breakdowns, plots
from draftsmith.inference.report import DEFINITIONS, render
from draftsmith.inference.tables import verdicts

Run = dict[str, Any]


def run(drafter: str, prompts: str, accepted: list[int], **changes: Any) -> Run:
    """A run of 100 drafts of 3, `accepted` per position, at 10 tokens/s when plain."""
    drafts = 0 if drafter == "none" else 100
    tokens = drafts + sum(accepted) if drafts else 100
    per_call = tokens / 100
    emitted = [
        0,
        drafts - accepted[0],
        *(a - b for a, b in zip(accepted, accepted[1:] + [0], strict=True)),
    ]
    entry = {
        "drafter": drafter,
        "prompts": prompts,
        "temperature": 0.0,
        "draft_tokens": 3 if drafts else 0,
        "num_drafts": drafts,
        "num_draft_tokens": 3 * drafts,
        "num_accepted_tokens": sum(accepted),
        "accepted_per_position": accepted if drafts else [],
        "mean_acceptance_length": 1 + sum(accepted) / drafts if drafts else 1.0,
        "tokens_per_target_call": per_call,
        "target_calls": 100,
        "tokens": tokens,
        "seconds": 10.0,
        "tokens_per_second": tokens / 10,
        "speedup": per_call,
        "identical_to_plain": True if drafts else None,
        "near_ties": 0,
        "first_differences": [],
        "tokens_per_step_histogram": emitted if drafts else [0, 100],
        "time": {"draft": 2.0, "verify": 6.0, "refill": 1.0, "sample": 0.5, "other": 0.5},
        "num_prompts": 4,
        "dtype": "bfloat16",
        "batch": 1,
    }
    return entry | changes


def example() -> dict[str, Any]:
    """Two prompt sets; n-gram look-up wins the first, the head the second. A source that is markup,
    an answer that merely goes on, and a text step by step."""
    endless = _DIFFERENCE | {"gap": math.inf, "near_tie": False}
    return {
        "target": {"source": "<img src=x>", "layers": 3},
        "head": {"kind": "mtp", "norms": {"output": True}},
        "data": {"tokens": 1234},
        "settings": {"seed": 0, "prompts": ["humaneval", "mt_bench"]},
        "runs": [
            run("none", "humaneval", [0, 0, 0]),
            run("ngram", "humaneval", [50, 40, 31]),
            run(
                "mtp",
                "humaneval",
                [40, 20, 9],
                near_ties=1,
                first_differences=[_DIFFERENCE],
                texts=[_TEXT],
            ),
            run("none", "mt_bench", [0, 0, 0]),
            run("ngram", "mt_bench", [20, 10, 5]),
            run(
                "mtp",
                "mt_bench",
                [45, 22, 11],
                identical_to_plain=False,
                first_differences=[endless],
            ),
        ],
    }


@pytest.fixture
def report() -> dict[str, Any]:
    """A copy of `example` to change."""
    return example()


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of `example` and of a short training."""
    folder = tmp_path_factory.mktemp("report")
    written = render(example(), _METRICS, folder)
    assert written[0] == folder / "report.json"
    assert set(written) == set(folder.iterdir()) and all(path.stat().st_size for path in written)
    return folder


_METRICS = [
    {"kind": "train", "step": 10, "cross_entropy": 5.0, "lr": 1e-3, "tokens_per_second": 100.0},
    {
        "kind": "validation",
        "step": 20,
        "loss": 4.5,
        "agreement": [0.3, 0.1],
        "acceptance": {"runs": {"heldout": {"0": {"tokens_per_target_call": 1.4}}}},
    },
]
_TEXT = {
    "prompts": "humaneval",
    "id": "HumanEval/3",
    "prompt": "Tell",
    "rounds": [
        {"accepted": "", "target": "The ", "rejected": ""},
        {"accepted": "cat <b>", "target": "sat", "rejected": ""},
        {"accepted": "on", "target": " a", "rejected": " the\nmat"},
    ],
}
_DIFFERENCE = {
    "prompt": "HumanEval/3",
    "position": 41,
    "gap": 0.0123,
    "bound": 0.2,
    "near_tie": True,
}


def test_json_is_the_report_and_nothing_else(report: dict[str, Any], rendered: Path) -> None:
    """What was measured is what is stored; JSON has no infinity, so null stands for it."""
    report["runs"][5]["first_differences"][0]["gap"] = None
    assert json.loads((rendered / "report.json").read_text()) == report


def test_markdown_prints_the_measured_numbers(report: dict[str, Any], rendered: Path) -> None:
    """Each row of the main table equals its run, recomputed here from the raw counts."""
    lines = (rendered / "report.md").read_text().splitlines()
    header = next(line for line in lines if line.startswith("| prompts | drafter"))
    columns = [cell.strip() for cell in header.strip("|").split("|")]
    first = lines.index(header) + 2
    for line, entry in zip(lines[first:], report["runs"], strict=False):
        cells = dict(
            zip(columns, (cell.strip() for cell in line.strip("|").split("|")), strict=True)
        )
        assert (cells["prompts"], cells["drafter"]) == (entry["prompts"], entry["drafter"])
        assert float(cells["tokens per target call"]) == pytest.approx(
            entry["tokens_per_target_call"], abs=5e-4
        )
        assert float(cells["tokens/s"]) == pytest.approx(entry["tokens_per_second"], abs=0.05)
        if entry["num_drafts"]:
            accepted = entry["accepted_per_position"]
            assert float(cells["mean acceptance length"]) == pytest.approx(
                1 + sum(accepted) / 100, abs=5e-4
            )
            assert cells["accepted / drafted"] == f"{sum(accepted)}/300 = {sum(accepted) / 300:.1%}"
            assert cells["accepted per position"] == " ".join(
                f"{count / 100:.1%}" for count in accepted
            )
            share = accepted[1] / accepted[0]
            assert cells["conditional"].split()[1] == f"{share:.1%}"
    assert [line.split("|")[-3].strip() for line in lines[first + 1 : first + 6]] == [
        "yes",
        "yes",
        "-",
        "yes",
        "NO",
    ]


def test_every_number_is_defined(rendered: Path) -> None:
    """Each column that holds a measure has its definition in both documents."""
    for name in ("report.md", "report.html"):
        text = (rendered / name).read_text()
        assert all(term in text for term in DEFINITIONS)
        assert "1 + num_accepted_tokens / num_drafts" in text


def test_where_look_up_wins_the_report_says_so(report: dict[str, Any]) -> None:
    """A sentence per prompt set; n-gram's victory is told in words, and only there."""
    first, second = verdicts(report["runs"])
    assert "n-gram look-up wins" in first and first.startswith("humaneval: ngram 2.21")
    assert "wins" not in second and second.startswith("mt_bench: mtp 1.78")


def test_slower_than_plain_is_said() -> None:
    """Accepted tokens that do not pay for the drafts are no speed-up."""
    runs = [
        run("none", "p", [0, 0, 0]),
        run("mtp", "p", [5, 1, 0], tokens_per_second=8.0, speedup=0.8),
    ]
    assert "Plain decoding is the fastest" in verdicts(runs)[0]


def test_differences_from_plain_are_listed(rendered: Path) -> None:
    """Prompt, position, gap, bound and judgement of each first difference; no gap explains an
    answer that merely goes on."""
    text = (rendered / "report.md").read_text()
    assert "| humaneval | mtp | HumanEval/3 | 41 | 0.0123 | 0.2 | near tie |" in text
    assert "| - | 0.2 | NOT EXPLAINED |" in text


def test_training_curves_come_from_the_metrics_file(rendered: Path) -> None:
    """Loss, agreement per draft, acceptance in the engine; each becomes a figure."""
    names = {path.name for path in rendered.iterdir()}
    assert {"training_loss.png", "training_agreement.png", "training_acceptance.png"} <= names


def test_html_loads_nothing(rendered: Path) -> None:
    """Figures are inside; no script, no style sheet, no address; what comes from outside cannot
    become markup."""
    text = (rendered / "report.html").read_text()
    assert "<img" not in text and "&lt;img src=x&gt;" in text
    sources = re.findall(r"""\s(?:xlink:)?(?:src|href)=["']([^"']{0,40})""", text)
    assert all(source.startswith("#") for source in sources)  # a figure's own parts
    assert text.count("<svg ") == 8 + 3  # of two prompt sets, of training
    assert not re.search(r"https?://|<script|<link|@import|url\((?!#)", text)
    assert 'name="viewport"' in text


def test_html_shows_how_the_text_was_drafted(rendered: Path) -> None:
    """Kept, lost, bonus and undrafted tokens are told apart by marks, not by colour alone."""
    page = (rendered / "report.html").read_text()
    assert (
        'The <span class="kept">cat &lt;b&gt;</span><span class="bonus">sat</span>'
        '<span class="kept">on</span><span class="lost">[<s> the↵mat</s>]</span> a</p>'
    ) in page
    for mark in (".kept {", ".bonus {"):
        assert "text-decoration: underline" in page[page.index(mark) :].split("}")[0]


def test_html_follows_the_screen(rendered: Path) -> None:
    """Figures have no colour of their own: every one is the page's ink or one that has a dark
    twin; and their words are words."""
    page = (rendered / "report.html").read_text()
    figures = "".join(re.findall("<svg .*?</svg>", page, re.DOTALL))
    assert not re.findall("#[0-9a-f]{6}", figures)
    style = page[: page.index("</style>")]
    dark = style[style.index("prefers-color-scheme: dark") :]
    for name in set(re.findall(r"var\((--c[0-9a-f]{6})\)", figures)):
        assert f"{name}: #" in dark
    assert "accepted up to here,</text>" in figures.replace("\n", "")
    assert 'aria-label="Speed: humaneval"' in figures


def test_breakdowns_pool_the_prompt_sets(report: dict[str, Any]) -> None:
    """By hand: calls and tokens of both sets are added before they are divided."""
    for entry, calls, tokens in zip(report["runs"][1::3], (100, 300), (200, 330), strict=True):
        entry["by_context"] = {"0": {"target_calls": calls, "tokens": tokens}}
    report["runs"][4]["by_context"]["256"] = {"target_calls": 10, "tokens": 30}
    found = breakdowns.by_context(report["runs"])
    assert found == {"ngram": {"0–255": (400, 530), "256–511": (10, 30)}}
    header, rows = breakdowns.table(found)
    assert header == ["drafter", "0–255", "256–511"]
    assert rows == [["ngram", "1.325 (400)", "3.000 (10)"]]
    assert breakdowns.by_temperature(report["runs"]) == {}
    warm = [
        run("mtp", prompts, [0, 0, 0], temperature=warmth, decode_tokens=tokens)
        for prompts, warmth, tokens in (("a", 0.0, 150), ("b", 0.0, 170), ("a", 1.0, 120))
    ]
    assert breakdowns.by_temperature(warm) == {"mtp": {"T=0": (200, 320), "T=1": (100, 120)}}
    assert breakdowns.draw({"none": {"0–255": (1, 1)}}, "", "") is None


def test_labels_name_only_what_differs() -> None:
    """Runs of one drafter are told apart by the settings in which they differ."""
    runs = [
        run("mtp", "p", [1, 0, 0]),
        run("mtp", "p", [1, 0, 0], temperature=1.0),
        run("ngram", "p", [1, 0, 0]),
    ]
    assert plots.labels(runs) == ["mtp T=0", "mtp T=1", "ngram"]


def test_shares_per_position() -> None:
    """Unconditional over all drafts; conditional over those accepted so far, None where there are
    none."""
    entry = run("mtp", "p", [50, 0, 0])
    assert plots.unconditional(entry) == [0.5, 0.0, 0.0]
    assert plots.conditional(entry) == [0.5, 0.0, None]
    assert plots.unconditional(run("none", "p", [0, 0, 0])) == []


def test_without_drafts_there_are_no_acceptance_figures(tmp_path: Path) -> None:
    """A report of plain decoding alone renders what there is."""
    names = {path.name for path in render({"runs": [run("none", "p", [0, 0, 0])]}, [], tmp_path)}
    assert {"report.json", "report.md", "report.html", "speed.png"} <= names
    assert "acceptance_per_position.png" not in names


def test_an_empty_report_is_refused(tmp_path: Path) -> None:
    """Nothing was measured, so nothing is written."""
    with pytest.raises(ValueError, match="no runs"):
        render({"runs": []}, [], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_lossy_runs_are_called_lossy():
    """In the sentence that gives their figures, and nowhere else."""
    runs = [run("none", "a", [0]), run("mtp", "a", [60, 30, 10], temperature=1.0, lossless=False)]
    runs[0]["temperature"] = 1.0
    lossless = [run("none", "b", [0]), run("mtp", "b", [60, 30, 10], lossless=True)]
    first, second = verdicts(runs + lossless)
    assert "LOSSY" in first and "LOSSY" not in second
