"""Where a run keeps what: one folder, `work`, and fixed names below it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..conf.schema import Config
from ..data.store import expanded


@dataclass(frozen=True)
class Artifacts:
    """The paths of a run: `work` holds what it makes, `inputs` its rows and caches (the same
    folder, mostly), `learned` the rows that states are dumped of and a head learns from
    (`data.answers`); `cache` is a path or an fsspec URL."""

    work: Path
    inputs: Path
    learned: Path
    cache: str
    """The target's hidden states over the learned rows."""

    @classmethod
    def of(cls, config: Config) -> Artifacts:
        """Those of a configuration."""
        work = Path(expanded(config.work))
        inputs = Path(expanded(config.inputs)) if config.inputs else work
        suffix = "" if config.data.answers == "found" else "-regenerated"
        cache = config.data.dump.folder or str(inputs / f"cache{suffix}")
        return cls(work, inputs, inputs / f"rows{suffix}", expanded(cache.rstrip("/")))

    @property
    def rows(self) -> Path:
        """Token rows as prepared, their ledger and manifest; held-out prompts come from here."""
        return self.inputs / "rows"

    @property
    def regenerated(self) -> Path:
        """The same rows with the target's own answers."""
        return self.inputs / "rows-regenerated"

    @property
    def heldout_cache(self) -> str:
        """The states of the held-out rows, which validation reads."""
        return f"{self.cache}-heldout"

    @property
    def train(self) -> Path:
        """run.json, metrics.jsonl, curves.png, checkpoints/, best/ and head/."""
        return self.work / "train"

    @property
    def metrics(self) -> Path:
        """One JSON object a line, of the training run."""
        return self.train / "metrics.jsonl"

    @property
    def curves(self) -> Path:
        """The curves of the training run, as a picture."""
        return self.train / "curves.png"

    @property
    def run(self) -> Path:
        """What the training run is, and whether it is finished."""
        return self.train / "run.json"

    @property
    def plan(self) -> Path:
        """The forecast of `plan`."""
        return self.work / "plan.json"

    @property
    def head(self) -> Path:
        """The native head folder that training ends with."""
        return self.train / "head"

    @property
    def best(self) -> Path:
        """The head of the best validation so far, while training goes on."""
        return self.train / "best"

    def head_or(self, folder: str | None) -> Path:
        """The head folder asked for, of any layout, or this run's own.

        Raises:
            ValueError: nothing is there; says how to make it.
        """
        path = self.head if folder is None else Path(expanded(folder))
        if not (path / "config.json").exists():
            remedy = "run `draftsmith train` first" if folder is None else "name the folder of one"
            raise ValueError(f"{path} holds no head (no config.json): {remedy}")
        return path

    def exported(self, layout: str, folder: str | None) -> Path:
        """The folder of an export."""
        return self.work / "export" / layout if folder is None else Path(expanded(folder))
