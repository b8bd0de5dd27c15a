"""Records of a dataset on the hub, streamed through `datasets`; nothing is written to the disk.

    hf://owner/name[@revision][?config=NAME&split=NAME]

Without `split` the only one is read, or `train`. The identity is the commit that the revision
stands for, so a dataset that moves on is noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

if TYPE_CHECKING:
    from datasets import IterableDataset

_KEYS = ("config", "split")
_FORM = "hf://owner/name[@revision][?config=NAME&split=NAME]"


class HubRecords:
    """Iterator over the records of one split; read once.

    Attributes:
        torn: always 0.
        total: records of the split, where the hub knows it.
        form: in words. identity: repository, commit, config and split.
    """

    def __init__(self, source: str) -> None:
        from huggingface_hub import HfApi

        repository, revision, options = _parsed(source)
        self.source = source
        self.torn = 0
        config = options.get("config")
        try:
            commit = HfApi().dataset_info(repository, revision=revision).sha
            found = _loaded(repository, config, commit)
        except Exception as error:  # the hub's client has no common base for what it raises
            raise ValueError(
                f"source {source!r}: the hub could not give it ({_short(error)}); check the name, "
                "the config and the network, or give a local path"
            ) from error
        split = options.get("split") or ("train" if len(found) > 1 else next(iter(found)))
        if split not in found:
            raise ValueError(
                f"source {source!r}: the splits are {', '.join(found)}; name one with ?split=NAME"
            )
        self._dataset = found[split]
        known = (self._dataset.info.splits or {}).get(split)
        self.total: int | None = (known.num_examples or None) if known else None
        self.form = f"dataset of the hub, split {split}, commit {commit}"
        self.identity = {
            "repository": repository,
            "commit": commit,
            "config": config or "",
            "split": split,
        }

    def __iter__(self) -> Iterator[Any]:
        read = 0
        try:
            for record in self._dataset:
                read += 1
                yield record
        except Exception as error:  # whatever the reader of that file form or the network raises
            raise ValueError(
                f"source {self.source!r}: record {read + 1}: {_short(error)}; {read} whole records "
                "lie before it; try again, or give a local path"
            ) from error
        if not read:
            raise ValueError(f"source {self.source!r}: the split is empty; name another")


def is_dataset(source: str) -> bool:
    """Whether an hf:// source names a dataset rather than a file in one."""
    return source.startswith("hf://") and len(_path(source).strip("/").split("/")) <= 2


def _path(source: str) -> str:
    return source.removeprefix("hf://").partition("?")[0]


def _parsed(source: str) -> tuple[str, str | None, dict[str, str]]:
    """owner/name, revision or None, and the options after the question mark."""
    named, _, revision = _path(source).strip("/").partition("@")
    query = source.partition("?")[2]
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = [key for key, value in options.items() if key not in _KEYS or not value]
    if named.count("/") != 1 or not all(named.split("/")) or unknown or (query and not options):
        raise ValueError(f"source {source!r}: write {_FORM}, or hf://owner/name/file")
    return named, revision or None, options


def _loaded(repository: str, config: str | None, commit: str | None) -> dict[str, IterableDataset]:
    from datasets import load_dataset

    splits = load_dataset(repository, config, revision=commit, streaming=True)
    return {str(name): split for name, split in splits.items()}


def _short(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
