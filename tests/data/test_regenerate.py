"""Answers by the target: the ids before each are untouched, the ids of each are the engine's own,
whatever runs beside it and however often the run is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from draftsmith.data.answers import row_key
from draftsmith.data.regenerate import RegenerateConfig, Regenerated, _seed, regenerate
from draftsmith.data.rowfile import RowWriter, file_facts
from draftsmith.data.rows import Row, Rows, RowsConfig, prepare
from draftsmith.data.runs import supervised_spans
from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.drafters import NgramDrafter
from draftsmith.inference.engine import Engine
from draftsmith.inference.head_drafter import HeadDrafter
from draftsmith.models.heads import HeadConfig, build_head
from draftsmith.models.norm import use_own_norms
from draftsmith.models.target import Target, TargetConfig, load_tokenizer

ENGINE = EngineConfig(pool_tokens=2048, max_batch=4)
Make = Callable[..., Regenerated]
LATER = ("overwrite", "progress", "finish")
GREEDY = RegenerateConfig(max_new_tokens=24)


@pytest.fixture(scope="module")
def target(talking_folder: Path) -> Target:
    """In float64, where every schedule must give the very same tokens."""
    return Target.load(TargetConfig(source=str(talking_folder), dtype="float64", device="cpu"))


@pytest.fixture(scope="module")
def tokenizer(target: Target) -> PreTrainedTokenizerBase:
    """SmolLM2's."""
    return load_tokenizer(target.folder)


@pytest.fixture(scope="module")
def prepared(
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    chats_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """13 training rows and 3 held out, half of them of two rounds."""
    out = tmp_path_factory.mktemp("prepared")
    config = RowsConfig(str(chats_file), max_records=16, holdout=3, max_length=160)
    prepare(config, tokenizer, target.fingerprint, out)
    return out


@pytest.fixture(scope="module")
def greedy(
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    prepared: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Regenerated:
    """Greedy answers to all of them, for tests that only look."""
    out = tmp_path_factory.mktemp("greedy")
    return regenerate(GREEDY, prepared, target, ENGINE, tokenizer, out)


@pytest.fixture
def make(
    target: Target, tokenizer: PreTrainedTokenizerBase, prepared: Path, tmp_path: Path
) -> Make:
    """regenerate(out, source, engine, target, drafter, LATER…, **settings)."""

    def run(out: str = "out", source: Path | None = None, **given: Any) -> Regenerated:
        rest = {name: given.pop(name) for name in LATER if name in given}
        target_, engine = given.pop("target", target), given.pop("engine", ENGINE)
        drafter = given.pop("drafter", None)
        config = RegenerateConfig(**{"max_new_tokens": 24, "save_seconds": 0, **given})
        return regenerate(
            config, source or prepared, target_, engine, tokenizer, tmp_path / out, drafter, **rest
        )

    return run


def rows(folder: Path) -> list[Row]:
    """Of both splits."""
    return [row for split in ("train", "heldout") for row in Rows.open(folder, split, verify=True)]


def answers(row: Row) -> list[list[int]]:
    return [row.tokens[start:end].tolist() for start, end in supervised_spans(row.supervised)]


def contexts(row: Row, count: int) -> list[list[int]]:
    """The ids before each of the first `count` answers, back to the answer before it."""
    spans = supervised_spans(row.supervised)[:count]
    ends = [0, *(end for _, end in spans)]
    return [row.tokens[end:start].tolist() for end, (start, _) in zip(ends, spans, strict=False)]


def by_place(folder: Path) -> dict[int, Row]:
    return {row.index: row for row in rows(folder)}


def test_context_is_untouched_and_answers_alone_are_supervised(
    greedy: Regenerated, prepared: Path
) -> None:
    """Every id outside an answer is the prepared row's own, in its place between the answers."""
    before, after = by_place(prepared), by_place(greedy.folder)
    assert 8 < len(after) <= 16
    for place, row in after.items():
        count = len(answers(row))
        assert contexts(row, count) == contexts(before[place], count)
        assert row.supervised[-1] and all(answer[-1] == 2 for answer in answers(row))
        assert (row.id, row.index) == (before[place].id, place)
    assert {len(answers(row)) for row in after.values()} == {1, 2}
    held = [row.index for row in Rows.open(greedy.folder, "heldout")]
    assert set(held) <= {row.index for row in Rows.open(prepared, "heldout")} and held


def test_every_answer_is_that_of_its_prompt_alone(greedy: Regenerated, target: Target) -> None:
    """The second answer of a chain too: its prompt holds the first as generated."""
    for row in rows(greedy.folder):
        for (start, _), answer in zip(supervised_spans(row.supervised), answers(row), strict=True):
            engine = Engine(target, ENGINE)
            (alone,) = engine.run([row.tokens[:start].tolist()], SamplingParams(24))
            assert alone.output == answer


def test_greedy_answers_are_those_of_transformers(greedy: Regenerated, target: Target) -> None:
    """Its own `generate`, without pages or batches."""
    model: Any = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float64)
    use_own_norms(model)
    for row in rows(greedy.folder)[:6]:
        for (start, _), answer in zip(supervised_spans(row.supervised), answers(row), strict=True):
            ids = torch.from_numpy(row.tokens[:start].astype(np.int64))[None]
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=24,
                do_sample=False,
                pad_token_id=2,
            )
            assert out[0, start:].tolist() == answer


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_neither_batch_nor_order_nor_drafter_changes_an_answer(
    make: Make,
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    chats_file: Path,
    temperature: float,
) -> None:
    """A request's seed comes from its row and turn; drafts are kept where plain decoding would have
    drawn them."""
    records = json.loads(chats_file.read_text())[:8]
    for name, ordered in (("straight", records), ("turned", records[::-1])):
        (tmp_path / f"{name}.json").write_text(json.dumps(ordered))
        config = RowsConfig(str(tmp_path / f"{name}.json"), holdout=1, max_length=2048)
        prepare(config, tokenizer, target.fingerprint, tmp_path / name)
    one = EngineConfig(0, 1, pool_tokens=2048)
    first = make("a", tmp_path / "straight", temperature=temperature, engine=one)
    texts = {row.id: row.tokens.tolist() for row in rows(first.folder)}
    assert len(texts) > 2
    head = build_head(HeadConfig(), target.folder, 2.0).double()
    for number, drafter in enumerate((None, NgramDrafter(), HeadDrafter(head, None))):
        done = make(
            f"b{number}",
            tmp_path / "turned",
            temperature=temperature,
            drafter=drafter,
            engine=EngineConfig(3, 5, max_step_tokens=32, page_size=4, pool_tokens=2048),
        )
        assert {row.id: row.tokens.tolist() for row in rows(done.folder)} == texts


def test_seeds_draw_apart(make: Make) -> None:
    """Another seed, another text; the same seed, the same bytes. Turns of a row draw apart, too."""
    texts = []
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        done = make(out, temperature=1.0, top_k=50, seed=seed, cut_answers="keep", max_rows=5)
        texts.append([row.tokens.tolist() for row in rows(done.folder)])
    assert texts[0] == texts[1] != texts[2]
    assert len({_seed(seed, key, turn) for seed in (0, 1) for key in "ab" for turn in (0, 1)}) == 8


def test_cut_answers_are_left_out_or_kept(make: Make) -> None:
    """By default a row ends with its last whole answer and is dropped, by name, where there is
    none; kept ones are counted, and nothing is generated anew for it."""
    dropped, kept = make("a", max_new_tokens=5), make("b", max_new_tokens=5, cut_answers="keep")
    cut = dropped.ledger["answers"]["cut"]
    assert cut == kept.ledger["answers"]["cut"] == kept.ledger["rows"]["cut_mid_answer"] > 0
    assert dropped.ledger["rows"]["cut_mid_answer"] == 0
    reasons = dropped.ledger["records"]["dropped"]
    assert reasons["cut"] == len(dropped.ledger["records"]["dropped_ids"]["cut"]) > 0
    assert all(answer[-1] == 2 for row in rows(dropped.folder) for answer in answers(row))
    short = [answer for row in rows(kept.folder) for answer in answers(row) if answer[-1] != 2]
    assert len(short) == cut and all(len(answer) == 5 for answer in short)
    assert max(len(answer) for row in rows(kept.folder) for answer in answers(row)) == 5
    again = make("a", max_new_tokens=5, cut_answers="keep")
    assert (again.generated, again.reused) == (0, False)
    names = ("train.parquet", "heldout.parquet", "ledger.json", "manifest.json")
    for name in names[:3]:
        assert (again.folder / name).read_bytes() == (kept.folder / name).read_bytes()


def test_another_end_id_ends_the_conversation(
    make: Make, greedy: Regenerated, target: Target
) -> None:
    """The template cannot go on behind it; the answer stays."""
    common = [answers(row)[0][0] for row in rows(greedy.folder) if len(answers(row)) == 2]
    ended = Target(
        target.folder, target.config, target.stack, target.trunk, frozenset({2, *common})
    )
    done = make("b", target=ended)
    told = done.ledger["answers"]
    assert told["other_end"] > 0 and told["unanswered_after_other_end"] > 0
    assert done.ledger["records"]["dropped"]["too_short"] > 0


def test_rows_respect_the_limit(
    make: Make, target: Target, tokenizer: PreTrainedTokenizerBase, chats_file: Path, tmp_path: Path
) -> None:
    """Prepare's max_length holds for what is generated; an answer that meets it is cut."""
    config = RowsConfig(str(chats_file), max_records=16, holdout=2, max_length=60)
    prepare(config, tokenizer, target.fingerprint, tmp_path / "short")
    done = make("a", tmp_path / "short", cut_answers="keep")
    lengths = [len(row.tokens) for row in rows(done.folder)]
    assert max(lengths) == 60 and done.ledger["answers"]["cut"] > 0


def test_the_ledger_adds_up(greedy: Regenerated, prepared: Path) -> None:
    """Rows, answers and tokens, and every supervised token is the target's."""
    ledger, source = greedy.ledger, rows(prepared)
    records, found, tokens = (ledger[name] for name in ("records", "answers", "tokens"))
    assert records["read"] == len(source) == records["kept"] + sum(records["dropped"].values())
    assert records["kept"] == ledger["rows"]["train"] + ledger["rows"]["heldout"]
    unanswered = sum(count for name, count in found.items() if name.startswith("unanswered"))
    assert found["found"] == sum(len(answers(row)) for row in source)
    assert found["found"] == found["generated"] + unanswered
    too_short = records["dropped"].get("too_short", 0)
    assert found["kept"] == found["generated"] - found["cut"] - too_short
    assert (
        tokens["on_policy"]
        == tokens["supervised"]
        == tokens["train_supervised"] + tokens["heldout_supervised"]
    )


def test_heldout_messages_tell_the_new_answers(
    greedy: Regenerated, prepared: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The users' words as they were, the answers decoded, nothing behind the last of them."""
    before = {row.index: row for row in Rows.open(prepared, "heldout")}
    for row in Rows.open(greedy.folder, "heldout"):
        asked = [m for m in before[row.index].messages or [] if m["role"] == "user"]
        told = row.messages or []
        count = len(answers(row))
        assert [m for m in told if m["role"] == "user"] == asked[:count]
        texts = [
            str(tokenizer.decode(answer, skip_special_tokens=True)).strip()
            for answer in answers(row)
        ]
        assert [m["content"] for m in told if m["role"] == "assistant"] == texts
    assert Rows.open(greedy.folder)[0].messages is None


def test_part_of_the_rows(make: Make, prepared: Path) -> None:
    """The first training rows, by number or tokens; more of them later go on from there."""
    lengths = Rows.open(prepared).lengths
    few = make(max_rows=4)
    assert few.ledger["records"]["read"] == 4 + 3
    same = make(max_tokens=int(lengths[:4].sum()))
    assert (same.generated, same.ledger) == (0, few.ledger)
    more = make()
    assert (more.resumed, more.ledger["records"]["read"]) == (7, 16)
    assert more.generated > 0
    assert make().reused
    with pytest.raises(ValueError, match="the first row has more tokens; raise it"):
        make("b", max_tokens=1)


def test_finished_answers_of_other_settings_are_not_removed_unasked(make: Make) -> None:
    """They are dear; the field and both values are named, and overwrite replaces them."""
    first = make(max_new_tokens=24)
    before = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    with pytest.raises(ValueError, match="max_new_tokens 24 -> 25.*overwrite=true"):
        make(max_new_tokens=25)
    assert {path.name: path.read_bytes() for path in first.folder.iterdir()} == before
    again = make(max_new_tokens=25, overwrite=True)
    assert again.messages == ("earlier answers are made anew: max_new_tokens 24 -> 25",)
    assert again.resumed == 0 and not again.reused


def test_answers_of_a_killed_run_are_not_removed_unasked(make: Make) -> None:
    """They are as dear as finished ones: without a manifest another setting removes none."""
    first = make()
    (first.folder / "manifest.json").unlink()
    before = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    with pytest.raises(ValueError, match="16 rows .*max_new_tokens 24 -> 25.*overwrite=true"):
        make(max_new_tokens=25)
    assert {path.name: path.read_bytes() for path in first.folder.iterdir()} == before
    assert make().resumed == 16
    (first.folder / "manifest.json").unlink()
    assert make(max_new_tokens=25, overwrite=True).resumed == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "manifest.json is no manifest; delete it"),
        ("null", "manifest.json is no manifest"),
        ('{"kind": "rows", "format": 2, "key": "k", "identity": []}', "identity is .*not a dict"),
        ('{"kind": "rows", "identity": {"answers": 3}}', "holds no regenerated rows"),
    ],
)
def test_an_injured_manifest_is_refused(
    make: Make, tmp_path: Path, text: str, message: str
) -> None:
    """Whatever JSON it holds, by its name and with the remedy."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        make()


def test_a_manifest_without_its_files_proves_no_rows(make: Make) -> None:
    """The rows are written again from the answers."""
    place = make(max_rows=2).folder / "manifest.json"
    whole = json.loads(place.read_text())
    place.write_text(json.dumps({**whole, "files": {}}))
    again = make(max_rows=2)
    assert (again.reused, again.generated) == (False, 0)
    assert json.loads(place.read_text()) == whole


def test_damaged_rows_are_written_again_from_the_answers(make: Make) -> None:
    """Without a token generated."""
    first = make()
    whole = (first.folder / "train.parquet").read_bytes()
    (first.folder / "train.parquet").write_bytes(whole[:50])
    again = make()
    assert (again.reused, again.generated) == (False, 0)
    assert (again.folder / "train.parquet").read_bytes() == whole


def test_nothing_usable_is_refused(make: Make, target: Target) -> None:
    """A target that knows no end of turn: with the reasons and the remedy."""
    endless = Target(target.folder, target.config, target.stack, target.trunk, frozenset())
    with pytest.raises(ValueError, match="16 cut.*raise regenerate.max_new_tokens"):
        make(max_new_tokens=2, target=endless)
    assert make(max_new_tokens=2, target=endless, cut_answers="keep").generated == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
        ({"temperature": -1}, "temperature -1"),
        ({"cut_answers": "no"}, "cut_answers='no': choose drop, keep"),
        ({"drafter": "x"}, "drafter='x': choose none, ngram, mtp"),
        ({"max_rows": 0}, "max_rows=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"save_seconds": -1}, "save_seconds=-1"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    """Each names the value."""
    with pytest.raises(ValueError, match=message):
        RegenerateConfig(**settings)


def test_unused_sampling_settings_warn(make: Make) -> None:
    """Greedy decoding looks at none of them."""
    with pytest.warns(UserWarning, match="temperature 0 takes the likeliest"):
        make(top_k=5)


def test_foreign_folders_are_refused(make: Make, prepared: Path, tmp_path: Path) -> None:
    """Rows of another tokenizer, and an output folder that holds prepared rows."""
    (tmp_path / "out").symlink_to(prepared)
    with pytest.raises(ValueError, match="holds no regenerated rows"):
        make()
    manifest = json.loads((prepared / "manifest.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    for name in ("train.parquet", "heldout.parquet"):
        (other / name).write_bytes((prepared / name).read_bytes())
    manifest["tokenizer"]["tokenizer"] = "another"
    (other / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="tokenizer of the rows is 'another'"):
        make("b", other)


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from draftsmith.data.regenerate import RegenerateConfig, regenerate
from draftsmith.inference.config import EngineConfig
from draftsmith.models.target import Target, TargetConfig, load_tokenizer

folder, rows, out = sys.argv[1:]
torch.set_num_threads(1)
target = Target.load(TargetConfig(source=folder, dtype="float64", device="cpu"))
tokenizer, engine = load_tokenizer(folder), EngineConfig(pool_tokens=2048, max_batch=4)
config = RegenerateConfig(max_new_tokens=24, save_seconds=0)
target.fingerprint
random.seed(0)
regenerate(config, rows, target, engine, tokenizer, out + "-undisturbed")


def count():
    return len(list(Path(out).glob("answers-*.parquet")))


kills, gathered = 0, False
while True:
    # One to four rows further, or once while the gathered answers become rows; then a little more.
    wanted = count() + random.randint(1, 4)
    child = os.fork()
    if child == 0:
        regenerate(config, rows, target, engine, tokenizer, out)
        os._exit(0)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        writing = not gathered and os.path.exists(out + "/answers.parquet")
        if writing or count() >= wanted:
            gathered |= writing
            time.sleep(random.uniform(0, 0.02))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            kills += 1
            break
        time.sleep(0.001)
    else:
        break

# Two ranks share the rows; the second is killed after its first part, and started again.
shared = out + "-shared"
children = {}


def start(rank):
    children[rank] = os.fork()
    if children[rank] == 0:
        share = RegenerateConfig(max_new_tokens=24, save_seconds=0, rank=rank, world_size=2)
        regenerate(share, rows, target, engine, tokenizer, shared)
        os._exit(0)


start(0)
start(1)
while not os.path.exists(shared + "/answers-00001.parquet"):
    time.sleep(0.001)
os.kill(children[1], signal.SIGKILL)
os.waitpid(children[1], 0)
waiting = not os.path.exists(shared + "/manifest.json")
start(1)
for child in children.values():
    assert os.waitpid(child, 0)[1] == 0
print(kills, waiting)
"""


def test_killed_runs_end_as_an_undisturbed_one(
    target: Target, prepared: Path, tmp_path: Path
) -> None:
    """SIGKILL again and again, a random while after some row is done, alone or as one of two ranks:
    the files are equal byte for byte, and nothing else is left."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(target.folder), str(prepared), str(tmp_path / "killed")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    whole = tmp_path / "killed-undisturbed"
    kills, waited = done.stdout.split()
    assert int(kills) >= 4 and waited == "True"
    names = sorted(path.name for path in whole.iterdir())
    for folder in (tmp_path / "killed", tmp_path / "killed-shared"):
        assert sorted(path.name for path in folder.iterdir()) == names
        for name in names:
            assert (folder / name).read_bytes() == (whole / name).read_bytes(), name


def test_shares_are_finished_by_a_later_call(
    greedy: Regenerated, make: Make, tmp_path: Path
) -> None:
    """Three ranks that finish nothing have every answer between them and none twice; one process
    then writes the rows without generating a token. A rank's share is its own whatever is there."""
    first = make("out", rank=2, world_size=3, finish=False)
    again = make("out", rank=2, world_size=3, finish=False)
    assert first.generated and not first.manifest and not again.generated
    shares = [first, *(make("out", rank=rank, world_size=3, finish=False) for rank in (0, 1))]
    assert not (tmp_path / "out" / "manifest.json").exists()
    done = make("out")
    assert not done.generated and done.resumed == 16
    assert sum(share.generated for share in shares) == greedy.generated
    for name in ("train.parquet", "heldout.parquet", "answers.parquet"):
        assert (done.folder / name).read_bytes() == (greedy.folder / name).read_bytes(), name
    with pytest.raises(ValueError, match="rank=3 of world_size 3"):
        RegenerateConfig(rank=3, world_size=3)


def test_a_source_that_grew_or_was_shuffled_keeps_its_answers(
    make: Make, target: Target, tokenizer: PreTrainedTokenizerBase, chats_file: Path, tmp_path: Path
) -> None:
    """By content, not by place: only what is new is generated."""
    make()
    records = json.loads(chats_file.read_text())[:20][::-1]
    (tmp_path / "more.json").write_text(json.dumps(records))
    config = RowsConfig(str(tmp_path / "more.json"), holdout=3, max_length=160)
    prepare(config, tokenizer, target.fingerprint, tmp_path / "more")
    grown = make(source=tmp_path / "more")
    assert grown.resumed == 16
    alone = make("alone", tmp_path / "more")
    assert alone.resumed == 0
    for name in ("train.parquet", "heldout.parquet", "ledger.json"):
        assert (grown.folder / name).read_bytes() == (alone.folder / name).read_bytes()


def test_equal_rows_are_answered_once(make: Make, prepared: Path, tmp_path: Path) -> None:
    """Two rows with the same ids and mask have one answer."""
    twice = tmp_path / "twice"
    twice.mkdir()
    first = Rows.open(prepared)[0]
    writer = RowWriter(twice / "train.parquet")
    writer.add(first)
    writer.add(first)
    writer.close()
    for name in ("heldout.parquet", "ledger.json"):
        (twice / name).write_bytes((prepared / name).read_bytes())
    manifest = json.loads((prepared / "manifest.json").read_text())
    manifest["counts"]["train"] = 2
    manifest["files"]["train.parquet"] = file_facts(twice / "train.parquet")
    (twice / "manifest.json").write_text(json.dumps(manifest))
    done = make("a", twice)
    a, b = Rows.open(done.folder)
    assert a.tokens.tolist() == b.tokens.tolist() and row_key(a) == row_key(b)
    assert done.generated == make("b", max_rows=1).generated


def test_a_row_that_the_pool_cannot_hold_is_named(make: Make, greedy: Regenerated) -> None:
    """With the remedy; what was answered before it is kept."""
    last = [supervised_spans(row.supervised)[-1][0] for row in rows(greedy.folder)]
    tight = EngineConfig(0, 1, page_size=1, pool_tokens=max(last) + 24 - 1)
    with pytest.raises(ValueError, match="request 'row chat-.*raise engine.pool_tokens"):
        make(engine=tight, save_seconds=1e6)
    assert make().resumed > 0


def test_progress_counts_tokens_and_foresees_them(make: Make) -> None:
    """It ends where it said it would."""
    seen: list[tuple[int, int | None]] = []
    done = make(progress=lambda *count: seen.append(count))
    assert seen[-1] == (done.generated, done.generated)
    assert all(total is not None and total >= now for now, total in seen)
