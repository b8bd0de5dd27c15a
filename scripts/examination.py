"""What `doctor` looks at: the artifacts of a configuration, in the order in which they are made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..conf.schema import Config
from ..data.cache import Cache
from ..data.cache_index import MANIFEST
from ..data.examine import Examination, examine_cache
from ..data.examine_rows import examine_rows
from ..data.examine_target import examine_target
from ..data.findings import Finding, faults_of
from ..data.rows import Rows
from ..data.store import Store, expanded
from ..models.files import read_json
from ..models.target import (
    Target,
    fingerprint,
    has_tokenizer,
    load_tokenizer,
    prepare_folder,
    torch_device,
)
from ..models.trunk import Trunk
from ..train.examine_head import examine_head
from ..train.examine_run import examine_report, examine_run
from ..train.material import Material
from ..train.metrics import best_validation, read_metrics
from ..train.probe_head import probe_head
from .artifacts import Artifacts

_FOLLOWS = {
    "target": (),
    "rows": ("target",),
    "cache": ("target", "rows"),
    "run": ("target", "rows", "cache"),
    "head": ("target", "rows", "cache"),
    "report": ("target", "rows", "cache", "run", "head"),
}
"""Every subject in the order of the way, and those whose faults would show in it again."""


@dataclass
class Examined:
    """One subject. `waits_for`: subjects with faults that must be mended before it is looked at."""

    subject: str
    place: str
    findings: list[Finding] = field(default_factory=list)
    waits_for: list[str] = field(default_factory=list)


class Doctor:
    """The examination of a configuration's artifacts.

    Args:
        target: the configuration's, where it is loaded already.
    Attributes:
        examined: what was looked at, and what was not for a fault before it, in order.
        trunk: the target's in float32, None where it cannot be read. cache: what the examination of
            the cache gave, None where there was none.
    """

    def __init__(self, config: Config, target: Target | None = None) -> None:
        self.config = config
        self.settings = config.doctor
        self.artifacts = Artifacts.of(config)
        self.folder = prepare_folder(config.target)
        self.examined: list[Examined] = []
        self.cache: Examination | None = None
        self.trunk: Trunk | None = None
        self._rows: Rows | None = None
        self._target = target

    def examine(self) -> list[Examined]:
        """Look at everything that is there, or that is named."""
        ways: dict[str, Callable[[Path], list[Finding]]] = {
            "rows": self._examine_rows,
            "run": lambda place: examine_run(place, self.cache_key),
            "head": self._examine_head,
            "report": lambda place: examine_report(read_json(place), self._agreement()),
        }
        for subject, place in self.places().items():
            one = Examined(subject, str(place))
            self.examined.append(one)
            one.waits_for = [
                other.subject
                for other in self.examined
                if other.subject in _FOLLOWS[subject] and faults_of(other.findings)
            ]
            if one.waits_for:
                continue
            if subject == "target":
                device = torch_device(self.config.target.device)
                kwargs = self.config.data.rows.template_kwargs
                one.findings, self.trunk = examine_target(self.folder, kwargs, device)
            elif subject == "cache":
                one.findings = self._examine_cache(str(place))
            else:
                one.findings = ways[subject](Path(place))
        return self.examined

    def places(self) -> dict[str, Path | str]:
        """Subject -> where it lies, of what is to be examined.

        Raises:
            ValueError: something named is not there.
        """
        named = {
            name: expanded(value)
            for name in ("cache", "run", "head", "report")
            if (value := getattr(self.settings, name)) is not None
        }
        for name, place in named.items():
            if name != "cache" and not Path(place).exists():  # that one says itself what it lacks
                raise ValueError(f"doctor.{name}={place}: nothing is there to examine")
        if named:
            return {"target": self.folder, **named}
        work = self.artifacts
        found: dict[str, Path | str] = {"target": self.folder}
        if (work.learned / "manifest.json").exists():
            found["rows"] = work.learned
        if Store(work.cache).exists(MANIFEST):
            found["cache"] = work.cache
        if work.metrics.exists():
            found["run"] = work.train
        for head in (work.head, work.best):
            if (head / "config.json").exists():
                found.setdefault("head", head)
        if (work.work / "report.json").exists():
            found["report"] = work.work / "report.json"
        return found

    @functools.cached_property
    def marks(self) -> dict[str, str]:
        """The target's fingerprint."""
        return fingerprint(self.folder)

    @property
    def cache_key(self) -> str | None:
        """Of the cache that was examined."""
        return self.cache.cache.key if self.cache and self.cache.cache else None

    def _examine_rows(self, place: Path) -> list[Finding]:
        if not has_tokenizer(self.folder):
            told = "the target's folder holds no tokenizer"
            return [Finding("tokenizer", "fault", told, "put the target's own there")]
        findings, self._rows = examine_rows(
            place,
            self.folder,
            load_tokenizer(self.folder),
            self.marks,
            self.config.data.rows.template_kwargs,
            rows=self.settings.rows,
            seed=self.settings.seed,
        )
        return findings

    def _examine_cache(self, place: str) -> list[Finding]:
        assert self.trunk is not None
        self.cache = examine_cache(
            place,
            self._load() if self.settings.target else None,
            self.trunk,
            self.marks,
            rows=self.settings.rows,
            seed=self.settings.seed,
            made_of=self._rows.key if self._rows else None,
        )
        return list(self.cache.findings)

    def _examine_head(self, place: Path) -> list[Finding]:
        assert self.trunk is not None
        material = self._material(self.trunk)
        return head_findings(place, self.folder, self.marks, material, self._validated())

    def _validated(self) -> list[float] | None:
        """Agreement by step of the run's best validation."""
        path = Path(expanded(self.settings.run)) if self.settings.run else self.artifacts.train
        path = path / "metrics.jsonl"
        if not path.exists() or (self.settings.head and not self.settings.run):
            return None
        best = best_validation(read_metrics(path))
        return best["agreement"] if best else None

    def _agreement(self) -> float | None:
        validated = self._validated()
        return validated[0] if validated else None

    def _material(self, trunk: Trunk) -> Material | None:
        """Rows with states for a head: held out where there are such, from a cache where there is
        one of this target, else made by the target itself."""
        places = [self.artifacts.heldout_cache, self.artifacts.cache]
        if self.settings.cache is not None:
            places = [expanded(self.settings.cache)]
        load = self._load if self.settings.target else None
        for place in places:
            if Store(place).exists(MANIFEST):
                cache = Cache.open(place, verify=False)
                if cache.manifest["target"]["weights"] == self.marks["weights"]:
                    return Material.of_cache(trunk, cache, load)
        if load is None or not (self.artifacts.learned / "manifest.json").exists():
            return None
        return Material.of_rows(trunk, Rows.open(self.artifacts.learned), load)

    def _load(self) -> Target:
        """The whole target, loaded by the first check that needs it."""
        if self._target is None:
            self._target = Target.load(self.config.target)
        return self._target


def head_findings(
    place: Path,
    folder: Path,
    marks: dict[str, str],
    material: Material | None,
    validated: list[float] | None = None,
) -> list[Finding]:
    """A head's folder, and where nothing is wrong with that, how the head runs.

    Args:
        folder, marks: the target's folder and fingerprint. material: rows to run it on, None where
            there are none. validated: agreement by step of its run, where it keeps none itself.
    """
    answers = None if material is None else material.answers
    examined = examine_head(place, folder, marks, answers)
    findings = list(examined.findings)
    if examined.loaded is None or faults_of(findings):
        return findings
    if material is None:
        told = "no cache of this target's, and no rows to make states of: the head was not run"
        return [*findings, Finding("agreement", "note", told, "name one, doctor.cache=…")]
    kept = (examined.meta.get("training") or {}).get("validation") or {}
    return [
        *findings,
        *probe_head(examined.loaded, material, kept.get("agreement") or validated),
    ]
