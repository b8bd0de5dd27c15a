"""Acceptance while training: what is counted, with which random numbers, by which ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from draftsmith.conf.compose import composed, to_config
from draftsmith.conf.schema import ValidateConfig
from draftsmith.inference.acceptance import measure
from draftsmith.inference.config import EngineConfig, SamplingParams
from draftsmith.inference.drafters import NgramDrafter, Proposal
from draftsmith.inference.head_drafter import HeadDrafter
from draftsmith.inference.metrics import EngineMetrics
from draftsmith.inference.sequence import Sequence
from draftsmith.models.heads import Head, HeadConfig, build_head
from draftsmith.models.target import Target, TargetConfig, load_tokenizer
from draftsmith.scripts.acceptance import prompt_set
from draftsmith.scripts.live import ACCEPTED, LiveAcceptance, shown

TIMES = ("seconds", "tokens_per_second")


@pytest.fixture(scope="module")
def endless(talking_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose answers go on to their limit."""
    folder = tmp_path_factory.mktemp("endless") / "target"
    shutil.copytree(talking_folder, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][2] = 0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def overrides(endless: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two prompt files of three and two questions, on that target in float64."""
    folder = tmp_path_factory.mktemp("live")
    for name, count in (("first", 3), ("second", 2)):
        lines = [json.dumps({"prompt": f"{name} question {n}: why?"}) for n in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return [
        f"work={folder}",
        f"target.source={endless}",
        f"target.folder={endless}",
        "target.dtype=float64",
        "target.device=cpu",
        f"validate.prompts=[{folder}/first.jsonl,{folder}/second.jsonl]",
        "validate.max_new_tokens=6",
        "engine.max_batch=2",
        "engine.draft_tokens=2",
        "engine.pool_tokens=1024",
        "tracker=none",
    ]


@pytest.fixture(scope="module")
def head(endless: Path) -> Head:
    """The beginning of a run: random, but copied from the target."""
    torch.manual_seed(0)
    return build_head(HeadConfig(), endless, 1.0, AutoConfig.from_pretrained(endless), None)


def without_times(figures: Any) -> Any:
    """Nested figures without what the clock says."""
    if isinstance(figures, dict):
        return {k: without_times(v) for k, v in figures.items() if k not in TIMES}
    return figures


@pytest.mark.filterwarnings("ignore:the prompt set .* prompts, 8 were asked for")
def test_counts_are_those_of_the_engine(overrides: list[str], head: Head) -> None:
    """By set and temperature; the score pools the sets at temperature 0; again, the same weights
    give the same figures, sampled ones too, as chains of K whatever `engine.adaptive` says."""
    config = to_config(composed(overrides))
    live = LiveAcceptance(to_config(composed([*overrides, "engine.adaptive=true"])), None)
    figures = live(head)
    assert without_times(live(head)) == without_times(figures)
    target = Target.load(config.target)
    calls = tokens = 0
    for name in config.validate.prompts:
        prompts = prompt_set(name, 8, config, load_tokenizer(target.folder))
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_new_tokens=6, temperature=temperature)
            drafter = HeadDrafter(head, None)
            right = measure(target, drafter, prompts, config.engine, params).to_json()
            found = figures["runs"][prompts.name][f"{temperature:g}"]
            shared = (right.keys() & found.keys()) - set(TIMES)
            assert {"num_drafts", "by_context", "drafts_per_step_histogram"} <= shared
            assert {k: found[k] for k in shared} == {k: right[k] for k in shared}
            if temperature == 0.0:
                calls, tokens = calls + found["target_calls"], tokens + found["decode_tokens"]
    assert figures["score"] == figures["tokens_per_target_call"] == tokens / calls
    assert [one["id"] for one in figures["samples"]] == ["prompt-0", "prompt-1"] * 2
    json.dumps(figures, allow_nan=False)


@pytest.mark.filterwarnings("ignore:the prompt set .* prompts, 8 were asked for")
def test_the_basis_holds_what_the_score_depends_on(overrides: list[str], head: Head) -> None:
    """More temperatures leave it; drafts, tokens, prompts and the scored temperature do not."""

    def basis(*changes: str) -> dict[str, Any]:
        few = ["validate.limit=1", "validate.max_new_tokens=2", "validate.temperatures=[0]"]
        words = [*overrides, *few, *changes]
        names = [word.split("=")[0] for word in words]
        last = [w for i, w in enumerate(words) if names[i] not in names[i + 1 :]]
        return LiveAcceptance(to_config(composed(last)), None)(head)["measured_with"]

    right = basis()
    assert basis("validate.temperatures=[0,0.5]", "validate.seed=3") == right
    assert right["seed"] is None and right["processes"] == 1
    for change in (
        "engine.draft_tokens=1",
        "validate.limit=2",
        "validate.temperatures=[1]",
    ):
        assert basis(change) != right, change


class _Oracle(NgramDrafter):
    """Drafts what the target will say, in every second round."""

    def __init__(self, answers: list[list[int]]) -> None:
        super().__init__()
        self.answers, self.rounds = answers, 0

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[Proposal]:
        self.rounds += 1
        if self.rounds % 2:
            return [Proposal([]) for _ in sequences]
        return [
            Proposal(self.answers[s.params.seed][len(s.output) : len(s.output) + count])
            for s, count in zip(sequences, counts, strict=True)
        ]


def test_accepted_drafts_are_marked(endless: Path) -> None:
    """Three tokens of each second step are between marks, and nothing else; without the marks the
    answer is the answer."""
    target = Target.load(TargetConfig(source=str(endless), dtype="float64", device="cpu"))
    tokenizer = load_tokenizer(endless)
    prompts = prompt_set("humaneval", 3, to_config(composed(["work=w"])), tokenizer)
    params = SamplingParams(max_new_tokens=18)
    answers = [s.output for s in measure(target, None, prompts, EngineConfig(), params).sequences]
    together = EngineConfig(max_step_tokens=4096)  # prefilled in one step
    result = measure(target, _Oracle(answers), prompts, together, params)
    assert all(steps == [1, 1, 4, 1, 4, 1, 4, 1, 1] for steps in result.steps)
    marked = shown(result, tokenizer)
    assert [one["id"] for one in marked] == prompts.ids[:2]
    for one, answer in zip(marked, answers, strict=False):
        drafts = re.findall(f"{ACCEPTED[0]}(.*?){ACCEPTED[1]}", one["answer"], re.DOTALL)
        assert len(drafts) == 3
        assert drafts == [tokenizer.decode(answer[at : at + 3]) for at in (2, 7, 12)]
        bare = one["answer"].replace(ACCEPTED[0], "").replace(ACCEPTED[1], "")
        assert bare == tokenizer.decode(answer)
        assert one["prompt"].startswith("…") and len(one["prompt"]) == 301


_RANK = """
import json, sys, warnings
import torch
import torch.distributed as dist
from transformers import AutoConfig
from draftsmith.conf.compose import composed, to_config
from draftsmith.models.heads import HeadConfig, build_head
from draftsmith.scripts.live import LiveAcceptance

warnings.simplefilter("ignore")
folder, *overrides = sys.argv[1:]
dist.init_process_group("gloo")
torch.manual_seed(0)
head = build_head(HeadConfig(), folder, 1.0, AutoConfig.from_pretrained(folder), None)
for ranks in ("all", "first"):
    config = to_config(composed([*overrides, f"validate.ranks={ranks}"]))
    live = LiveAcceptance(config, None)
    print(json.dumps([live(head), live._target is not None]))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the prompt set .* prompts, 8 were asked for")
def test_two_ranks_share_the_prompts(overrides: list[str], head: Head, endless: Path) -> None:
    """`all`: raw counts are the sums of what each half gives, with the random numbers of the whole
    set; `first`: rank 1 loads no target and gets rank 0's figures, which are those of one
    process."""
    first = [word for word in overrides if not word.startswith("validate.prompts")]
    place = overrides[0].removeprefix("work=")
    overrides = [*first, f"validate.prompts=[{place}/first.jsonl]"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(endless), *overrides],
            env={**env, "RANK": str(number), "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-2000:]
    (all_0, loaded_0), (first_0, _) = map(json.loads, outputs[0][0].splitlines()[-2:])
    (all_1, loaded_1), (first_1, waited) = map(json.loads, outputs[1][0].splitlines()[-2:])
    assert loaded_0 and loaded_1 and not waited
    assert without_times(all_0) == without_times(all_1)
    assert without_times(first_0) == without_times(first_1)

    config = to_config(composed(overrides))
    assert without_times(LiveAcceptance(config, None)(head)) == without_times(first_0)
    assert all_0["measured_with"] == first_0["measured_with"] | {"processes": 2}
    target = Target.load(config.target)
    for name in config.validate.prompts:
        prompts = prompt_set(name, 8, config, load_tokenizer(target.folder))
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_new_tokens=6, temperature=temperature)
            whole = EngineMetrics()
            for number in range(2):
                part = prompts.part(number, 2)
                drafter = HeadDrafter(head, None)
                whole.add(measure(target, drafter, part, config.engine, params).metrics)
            found = all_0["runs"][prompts.name][f"{temperature:g}"]
            counts = whole.to_json()
            assert {k: found[k] for k in counts} == counts
            assert found["num_prompts"] == len(prompts.prompts)


def test_a_part_keeps_the_random_numbers_of_the_whole(overrides: list[str], head: Head) -> None:
    """Sampled answers of every second prompt are those that the whole set gets."""
    config = to_config(composed(overrides))
    target = Target.load(config.target)
    tokenizer = load_tokenizer(target.folder)
    prompts = prompt_set(config.validate.prompts[0], 3, config, tokenizer)
    params = SamplingParams(max_new_tokens=6, temperature=1.0, seed=3, coupled=True)
    one = dataclasses.replace(config.engine, max_batch=1)
    whole = measure(target, HeadDrafter(head, None), prompts, one, params)
    part = measure(target, HeadDrafter(head, None), prompts.part(1, 2), one, params)
    assert [s.output for s in part.sequences] == [s.output for s in whole.sequences][1::2]
    assert [s.id for s in part.sequences] == ["prompt-1"]


def test_sets_of_one_name_are_refused(overrides: list[str], head: Head, tmp_path: Path) -> None:
    """Their counts would be added up as one."""
    twin = tmp_path / "first.jsonl"
    twin.write_text(json.dumps({"prompt": "other"}))
    config = to_config(composed([*overrides, "validate.limit=1"]))
    both = dataclasses.replace(config.validate, prompts=(config.validate.prompts[0], str(twin)))
    with pytest.raises(ValueError, match=r"are called \['first', 'first'\]"):
        LiveAcceptance(dataclasses.replace(config, validate=both), None)(head)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"prompts": ()}, "at least one entry"),
        ({"temperatures": ()}, "at least one entry"),
        ({"temperatures": (0.0, -0.5)}, "-0.5 must be 0"),
        ({"limit": 0}, "at least 1"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], told: str) -> None:
    """With the value."""
    with pytest.raises(ValueError, match=told):
        ValidateConfig(**changes)
