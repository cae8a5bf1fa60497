"""A model of the Hugging Face Hub, fetched by ``huggingface_hub`` into its cache: what it consists of, nothing else."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from titan_rl.config.model_directory.directory import BELONGS, INDEX, SINGLE, weight_map

_SECONDS = 10.0
"""For an answer of the Hub."""


def is_hub_name(path: str) -> bool:
    """``organization/model``, where there is no such directory, nor one that it might be meant to be in."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None and path[0] != "." and not Path(path).parent.exists()


def fetch(name: str, check: Callable[[Path], None]) -> str:
    """The model's directory in the cache. ``check`` sees it before the weights are fetched.

    Errors: ValueError if there is no such model, no network and nothing in the cache, or what ``check`` raises.
    """
    folder = _snapshot(name, [*BELONGS, INDEX], quietly=True)
    check(folder)
    names = set(weight_map(folder).values()) if (folder / INDEX).exists() else {SINGLE}
    return str(_snapshot(name, sorted(names), revision=folder.name))


def _snapshot(name: str, patterns: list[str], *, revision: str | None = None, quietly: bool = False) -> Path:
    # half a second that only a name of the Hub needs
    from httpx import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        with _no_bars() if quietly else nullcontext():
            return Path(snapshot_download(name, allow_patterns=patterns, revision=revision, etag_timeout=_SECONDS))
    except GatedRepoError:
        why = "the Hub gives it only to those who agreed to its terms: do so on its page, then `hf auth login`"
    except RepositoryNotFoundError:
        why = "there is no such directory, and no such model on the Hub (or it is private: `hf auth login`)"
    except (HfHubHTTPError, HFValidationError, HTTPError, OSError) as error:
        said = next(iter(str(error).splitlines()), type(error).__name__)
        why = f"there is no such directory, and the Hub cannot be asked for that model ({said}): give a directory"
    raise ValueError(why)


@contextmanager
def _no_bars() -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    was_quiet = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not was_quiet:
            enable_progress_bars()
