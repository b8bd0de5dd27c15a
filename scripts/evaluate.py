"""`draftsmith evaluate`: head + prompts -> acceptance report, beside plain decoding and prompt
look-up."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch

from ..conf.schema import Config
from ..data.cache_index import MANIFEST, read_manifest
from ..data.rows import Rows
from ..data.store import Store
from ..inference.acceptance import PromptSet, RunResult, measure
from ..inference.config import SamplingParams
from ..inference.draft_lm import DraftLM
from ..inference.drafted_text import drafted_texts
from ..inference.parallel import Load, joined
from ..inference.report import render
from ..models.files import content_hash, read_json, sha256_file
from ..models.formats.source import NATIVE, content_of, read_head
from ..models.heads import LoadedHead
from ..models.provenance import provenance, write_provenance
from ..models.target import Target, fingerprint, load_tokenizer, prepare_folder
from ..train.metrics import read_metrics
from .acceptance import (
    TRAINED,
    draft_model,
    drafter,
    drafts_with_head,
    is_head,
    prompt_set,
    require_kind,
    say_shares,
    warn_beyond_training,
)
from .app import Invocation, Verb
from .artifacts import Artifacts
from .progress import progress
from .report_shown import show

_SHOWN = 1  # answers of each run whose text is kept, step by step


def run(config: Config, invocation: Invocation) -> None:
    """Measure, write the report, show its table."""
    with joined() as load:
        if load is None:
            return
        report, written = evaluate(config, invocation, load)
    show(report, invocation)
    invocation.wrote(
        **{path.suffix[1:]: path for path in written if path.suffix != ".png"},
        plots=written[0].parent / "*.png",
    )
    invocation.next("export")


def evaluate(
    config: Config, invocation: Invocation, load: Load = Target.load
) -> tuple[dict[str, Any], list[Path]]:
    """The report, and the files it was written to.

    Args:
        load: how the target is loaded, see `parallel.joined`.
    """
    artifacts, settings = Artifacts.of(config), config.evaluate
    # A head may be listed as `head` and by its kind; it is measured once.
    listed = ("head" if is_head(name) else name for name in settings.drafters)
    names = tuple(dict.fromkeys(("none", *listed)))
    model = draft_model(config, names)
    runs, target, loaded = _pass(
        config, config.target.dtype, names, settings.temperatures, model, invocation, load
    )
    about = {
        "target": _about_target(target, config),
        "head": _about_head(loaded, config),
        "draft_lm": _about_draft_lm(model, config),
    }
    if settings.proof is not None:
        del target, loaded
        batched = dataclasses.replace(config.engine, max_batch=settings.proof_batch)
        once = dataclasses.replace(settings, draft_tokens=())
        proof = dataclasses.replace(config, engine=batched, evaluate=once)
        compared = tuple(name for name in names if name == "none" or name in TRAINED)
        runs += _pass(proof, settings.proof, compared, (0.0,), model, invocation, load)[0]
    report = {
        **about,
        "data": _about_data(artifacts),
        "settings": {**_settings(config), "threads": torch.get_num_threads()},
        "provenance": {
            name: value
            for name, value in provenance(invocation.resolved).items()
            if name != "config"
        },
        "key": key(config),
        "runs": runs,
    }
    metrics = list(read_metrics(artifacts.metrics)) if artifacts.metrics.exists() else []
    written = render(report, metrics, artifacts.work)
    write_provenance(artifacts.work, invocation.resolved)
    return report, written


def _pass(
    config: Config,
    dtype: str,
    drafters: tuple[str, ...],
    temperatures: tuple[float, ...],
    model: Target | None,
    invocation: Invocation,
    load: Load,
) -> tuple[list[dict[str, Any]], Target, LoadedHead | None]:
    """Every drafter on every prompt set and temperature, the target in one dtype."""
    settings, runs = config.evaluate, []
    target = load(dataclasses.replace(config.target, dtype=dtype))
    say_shares(target, invocation)
    loaded = _head(config, target)
    if loaded is not None and loaded.meta["layout"] != NATIVE:
        invocation.say(f"the head is read from the layout {loaded.meta['layout']}")
    lm = DraftLM.paired(model, target) if model else None
    tokenizer = load_tokenizer(target.folder)
    for name in settings.prompts:
        prompts = prompt_set(name, settings.limit, config, tokenizer)
        if loaded is not None:
            warn_beyond_training(loaded, prompts, settings.max_new_tokens)
        for temperature in temperatures:
            params = SamplingParams(
                max_new_tokens=settings.max_new_tokens,
                temperature=temperature,
                seed=settings.seed,
                verification=settings.verification if temperature else "rejection",
            )
            measured = _measured(target, loaded, lm, drafters, prompts, params, config, invocation)
            for result in measured:
                entry = result.to_json()
                if result.drafter != "none":
                    texts = drafted_texts(result, tokenizer, _SHOWN)
                    entry["texts"] = [text.to_json() for text in texts]
                runs.append(entry)
    return runs, target, loaded


def key(config: Config) -> str:
    """Hash of everything that determines a report but the machine: the bytes of head, target and
    prompts, and the settings."""
    artifacts, settings = Artifacts.of(config), config.evaluate
    head = None
    if _needs_head(config):
        head = content_of(artifacts.head_or(settings.head))
    files = {name: Path(name) for name in settings.prompts if name != "heldout"}
    prompts = {name: sha256_file(path) for name, path in files.items() if path.is_file()}
    if "heldout" in settings.prompts:
        prompts["heldout"] = Rows.open(artifacts.rows, "heldout").key
    models = {"target": dataclasses.asdict(config.target)}
    if any(name.endswith("draft-lm") for name in settings.drafters):
        models["draft_lm"] = dataclasses.asdict(config.draft_lm)
    return content_hash(
        {
            "head": head,
            **_settings(config),
            **models,
            "fingerprint": fingerprint(prepare_folder(config.target)),
            "prompts": prompts,
            "template_kwargs": config.data.rows.template_kwargs,
        }
    )


def reusable(config: Config) -> dict[str, Any] | None:
    """The report in the work folder, if it is the one that these settings and this head would
    give."""
    path = Artifacts.of(config).work / "report.json"
    if not path.exists() or not path.with_suffix(".html").exists():
        return None
    report = read_json(path)
    return report if report.get("key") == key(config) else None


def _measured(
    target: Target,
    loaded: LoadedHead | None,
    lm: DraftLM | None,
    drafters: tuple[str, ...],
    prompts: PromptSet,
    params: SamplingParams,
    config: Config,
    invocation: Invocation,
) -> list[RunResult]:
    """Every drafter on one prompt set, plain decoding first, since the others are compared with
    it."""
    plain: RunResult | None = None
    results = []
    swept = config.evaluate.draft_tokens or (config.engine.draft_tokens,)
    chains = [
        (drafting, count)
        for drafting in drafters
        for count in (swept if drafting in TRAINED else (config.engine.draft_tokens,))
    ]
    for name, count in chains:
        drafting = drafter(name, loaded, target, lm, config.engine.tree, config.ngram)
        label = drafting.name if drafting else name
        what = (
            f"{prompts.name}, {label}, temperature {params.temperature:g}, {str(target.dtype)[6:]}"
        )
        if name != "none":
            what += f", K={count}"
        engine = dataclasses.replace(config.engine, draft_tokens=count)
        with progress(invocation.console, what, "prompts") as report:
            result = measure(target, drafting, prompts, engine, params, plain, report)
        plain = plain or result
        results.append(result)
        counts = result.metrics
        invocation.say(
            f"{what}: {counts.tokens_per_target_call:.3f} tokens per target call, "
            f"{result.tokens_per_second:.1f} tokens/s"
            + (f" ({result.speedup:.2f}×)" if name != "none" and result.speedup else "")
        )
    return results


def _needs_head(config: Config) -> bool:
    return any(drafts_with_head(name) for name in config.evaluate.drafters)


def _head(config: Config, target: Target) -> LoadedHead | None:
    if not _needs_head(config):
        return None
    folder = Artifacts.of(config).head_or(config.evaluate.head)
    loaded = read_head(folder, target.folder, target.fingerprint)
    require_kind(loaded, config.evaluate.drafters)
    return loaded


def _about_target(target: Target, config: Config) -> dict[str, Any]:
    return {
        "source": config.target.source,
        "family": str(target.config.model_type),
        "layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "vocabulary": target.vocab_size,
        "device": str(target.device),
        "fingerprint": dict(target.fingerprint),
    }


def _about_head(loaded: LoadedHead | None, config: Config) -> dict[str, Any]:
    if loaded is None:
        return {}
    known = (
        "layout",
        "head",
        "recycle",
        "draft_vocab_size",
        "trained_length",
        "training",
        "sha256",
    )
    folder = Artifacts.of(config).head_or(config.evaluate.head)
    parameters = sum(parameter.numel() for parameter in loaded.head.parameters())
    about = {name: loaded.meta[name] for name in known if name in loaded.meta}
    return {"folder": folder.as_posix(), "parameters": parameters, **about}


def _about_draft_lm(model: Target | None, config: Config) -> dict[str, Any]:
    if model is None:
        return {}
    return {
        "source": config.draft_lm.source,
        "family": str(model.config.model_type),
        "layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "vocabulary": model.vocab_size,
        "dtype": str(model.dtype)[6:],
        "fingerprint": dict(model.fingerprint),
    }


def _about_data(artifacts: Artifacts) -> dict[str, Any]:
    about: dict[str, Any] = {}
    if (artifacts.learned / "ledger.json").exists():
        ledger = read_json(artifacts.learned / "ledger.json")
        about |= {name: ledger[name] for name in ("records", "tokens")}
        tokens = ledger["tokens"]
        about["on_policy_share"] = tokens.get("on_policy", 0) / max(tokens["supervised"], 1)
    store = Store(artifacts.cache)
    if store.exists(MANIFEST):
        manifest = read_manifest(store)
        about["cache"] = {
            "key": manifest["key"],
            "boundaries": manifest["boundaries"],
            **manifest["counts"],
        }
    if artifacts.curves.exists():
        about["training_curves"] = artifacts.curves.relative_to(artifacts.work).as_posix()
    return about


def _settings(config: Config) -> dict[str, Any]:
    """What the runs were made with, JSON-ready."""
    sections = {"evaluate": config.evaluate, "engine": config.engine}
    told = {name: dataclasses.asdict(section) for name, section in sections.items()}
    told["evaluate"].pop("head")
    if any(name.startswith("ngram+") for name in config.evaluate.drafters):
        told["ngram"] = dataclasses.asdict(config.ngram)
    listed = {
        name: list(value) for name, value in told["evaluate"].items() if isinstance(value, tuple)
    }
    told["evaluate"] |= listed
    return told


VERB = Verb(
    name="evaluate",
    task=run,
    reads=(
        "a head (WORK/train/head), the target, the language model of draft_lm.source, WORK/rows "
        "for held-out prompts, WORK/train/metrics.jsonl"
    ),
    writes="WORK/report.json, report.md, report.html, *.png, provenance.json",
    sections=(
        "work",
        "inputs",
        "data.answers",
        "evaluate",
        "engine",
        "ngram",
        "draft_lm",
        "target.dtype",
    ),
    examples=(
        "draftsmith evaluate",
        "draftsmith evaluate evaluate.temperatures=[0,1] evaluate.limit=80",
        "torchrun --nproc-per-node 4 -m draftsmith.scripts.evaluate target=llama-3.3-70b",
        "draftsmith evaluate evaluate.head=some/head evaluate.prompts=[mt_bench,my/prompts.jsonl] "
        "engine.draft_tokens=5",
        "draftsmith evaluate evaluate.head=some/eagle3-for-vllm",
        "draftsmith evaluate engine.tree.kind=dynamic engine.draft_tokens=5",
        "draftsmith evaluate 'evaluate.drafters=[ngram,head,ngram+head]' engine.adaptive=true",
    ),
    kept="the report is written at the end, so an earlier one is untouched",
)


def main() -> int:
    """`python -m draftsmith.scripts.evaluate`."""
    return VERB.main()


if __name__ == "__main__":
    sys.exit(main())
