"""Data sets of the Hugging Face Hub by name: ``openai/gsm8k:main:train@revision``.

``huggingface_hub`` fetches the files of one split into its cache. Without network a snapshot in the cache serves.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from titan_rl.config.io.bounded_files import JSON_BYTES, RefusedFile, read_text
from titan_rl.config.model_directory.hub import no_bars
from titan_rl.data.storage.hub_splits import choose_files

_SECONDS = 4.0
"""For the Hub's first answer."""
_NAME = re.compile(
    r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(?::(?P<first>[\w.-]*))?(?::(?P<second>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?"
)
_CARD = "README.md"
_KIND = "dataset"


@dataclass(frozen=True)
class HubName:
    """Name of a split on the Hub."""

    repository: str
    words: tuple[str, ...] = ()
    """Config and split, or one of them."""
    revision: str = ""
    """Branch, tag or commit; empty: the newest."""

    @property
    def command(self) -> str:
        """Command that downloads it where there is network."""
        at = f" --revision {self.revision}" if self.revision else ""
        return f"hf download {self.repository} --repo-type {_KIND}{at}"


@dataclass(frozen=True)
class HubFiles:
    """Files of a split in the cache, and the commit that they are of."""

    paths: tuple[Path, ...]
    commit: str


def parse_hub_name(name: str) -> HubName | None:
    """Parts of a name such as ``openai/gsm8k:main:train@revision``; None for what has another form."""
    match = _NAME.fullmatch(name)
    if match is None or ".." in name:
        return None
    words = tuple(word for word in (match["first"], match["second"]) if word is not None)
    return HubName(match["repository"], words, match["revision"] or "")


@lru_cache(maxsize=64)
def fetch_split(name: HubName) -> HubFiles:
    """Files of a split, fetched unless they are in the cache.

    One process asks the Hub once a name, so that all of it sees one commit. Errors: ValueError with the mend.
    """
    with _said(name):
        listing = _list_remote(name)
        return _from_cache(name) if listing is None else _download(name, *listing)


def _list_remote(name: HubName) -> tuple[str, list[str]] | None:
    """Commit and files; None if the Hub cannot be reached."""
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = HfApi().dataset_info(name.repository, revision=name.revision or None, timeout=_SECONDS)
    except HfHubHTTPError:  # it can
        raise
    except (HTTPError, OSError):
        return None
    return info.sha or "", [each.rfilename for each in info.siblings or []]


def _download(name: HubName, commit: str, files: list[str]) -> HubFiles:
    from httpx import HTTPError
    from huggingface_hub import hf_hub_download, snapshot_download

    def get(file: str) -> Path:
        return Path(hf_hub_download(name.repository, file, repo_type=_KIND, revision=commit))

    with no_bars():
        card = read_card(get(_CARD)) if _CARD in files else {}
        paths = tuple(get(file) for file in choose_files(files, card, name.words))
        with suppress(HTTPError, OSError):  # its listing, and the commit of its branch, for when there is no network
            snapshot_download(name.repository, repo_type=_KIND, revision=name.revision or None, allow_patterns=[_CARD])
        return HubFiles(paths, commit)


def _from_cache(name: HubName) -> HubFiles:
    from huggingface_hub import snapshot_download

    known = {"repo_type": _KIND, "revision": name.revision or None, "local_files_only": True}
    folder = Path(snapshot_download(name.repository, **known, allow_patterns=[_CARD]))
    cached = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    listing = _kept_listing(name.repository, folder.name)
    try:
        card = read_card(folder / _CARD) if _CARD in cached else {}
        chosen = choose_files(listing or cached, card, name.words, are_all=listing is not None)
        if missing := sorted(set(chosen).difference(cached)):
            raise ValueError(
                f"{len(missing)} of the {len(chosen)} files of the split are missing, such as {missing[0]}"
            )
    except RefusedFile:
        raise
    except ValueError as error:
        raise ValueError(
            f"the Hub cannot be reached, and of its files in the cache {folder} {error}; or, where there is network, "
            f"run `{name.command}` and copy them there"
        ) from None
    return HubFiles(tuple(folder / file for file in chosen), folder.name)


def _kept_listing(repository: str, commit: str) -> list[str] | None:
    """Files of a commit, as a download has kept their names; None if none has."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return [file.path for file in get_cached_repo_tree(repository, repo_type=_KIND, revision=commit)]
    except CachedRepoTreeNotFoundError:
        return None


def read_card(path: Path) -> Mapping[str, Any]:
    """Front matter of a card; empty without any. Errors: ValueError for what is no YAML; RefusedFile; OSError."""
    import yaml

    match = re.match(r"\s*---[ \t]*\r?\n(.*?)\r?\n---", read_text(path, JSON_BYTES, errors="replace"), re.DOTALL)
    try:
        card = yaml.safe_load(match[1]) if match else None
    except (yaml.YAMLError, ValueError, RecursionError):  # a date that is none is a ValueError
        raise ValueError(f"the front matter of its {_CARD} is no YAML: give its files by their path") from None
    return card if isinstance(card, dict) else {}


@contextmanager
def _said(name: HubName) -> Iterator[None]:
    """Whatever keeps the files away becomes a ValueError of one line."""
    from httpx import HTTPError
    from huggingface_hub import constants, errors
    from huggingface_hub.file_download import repo_folder_name

    try:
        yield
        return
    except RefusedFile:
        raise
    except errors.GatedRepoError:
        why = "the Hub gives it only to those who agreed to its terms: do so on its page, then `hf auth login`"
    except errors.RepositoryNotFoundError:
        why = "there is no such file, and no such data set on the Hub (or it is private: `hf auth login`)"
    except errors.RevisionNotFoundError:
        why = f"the Hub has no revision {name.revision!r} of it: correct what follows the @"
    except errors.LocalEntryNotFoundError:
        folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name.repository, repo_type=_KIND))
        why = (
            f"there is no such file, and the Hub cannot be reached: where it can, run `{name.command}` and copy what "
            f"that made to {folder}, or give its files by their path"
        )
    except (errors.HfHubHTTPError, errors.HFValidationError, HTTPError, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        why = f"there is no such file, and the Hub does not give such a data set: {reason}"
    raise ValueError(why)
