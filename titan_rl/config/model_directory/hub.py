"""A model of the Hugging Face Hub, fetched by ``huggingface_hub`` into its cache: what it consists of, nothing else."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from titan_rl.config.model_directory.directory import BELONGS, INDEX, SINGLE, how_to_make, weight_map

_SECONDS = 4.0
"""For the Hub's first answer. A snapshot's download would wait without end for a Hub that is silent."""


def is_hub_name(path: str) -> bool:
    """``organization/model``, where there is no such directory, nor one that it might be meant to be in."""
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None and path[0] != "."
    return is_name and not os.path.exists(os.path.dirname(path))  # which no name is too long for


def fetch(name: str, check: Callable[[Path], None]) -> str:
    """The model's directory in the cache. ``check`` sees it before the weights are fetched.

    Errors: ValueError if there is no such model, no network and nothing in the cache, or what ``check`` raises.
    """
    return _path_from_hub(name, lambda: _fetch(name, check))


def fetch_config(name: str) -> str:
    """A directory with the model's config.json, and whatever else of it is in the cache. Errors: as ``fetch``."""
    return _path_from_hub(name, lambda: _fetch_config(name))


def _path_from_hub(name: str, get: Callable[[], Path]) -> str:
    # half a second that only a name of the Hub needs
    from httpx import HTTPError
    from huggingface_hub import errors

    none = f"there is no directory {Path(name).absolute()}, and"
    try:
        return str(get())
    except errors.GatedRepoError:
        mend = "do so on its page, then `hf auth login`"
        raise ValueError(f"the Hub gives it only to those who agreed to its terms: {mend}") from None
    except errors.RepositoryNotFoundError:
        why = f"{none} no such model on the Hub (or it is private: `hf auth login`)"
    except errors.LocalEntryNotFoundError:
        why = (
            f"{none} the Hub cannot be reached, nor does its cache hold such a model: where it can, run "
            f"`hf download {name} --local-dir {Path(name).name}` and give that directory"
        )
    except (errors.HfHubHTTPError, errors.HFValidationError, HTTPError, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        why = f"{none} the Hub does not give such a model: {reason}"
    raise ValueError(how_to_make(name) or why)


def _fetch(name: str, check: Callable[[Path], None]) -> Path:
    from huggingface_hub import snapshot_download

    revision = _newest_revision(name)
    known = {"revision": revision, "local_files_only": revision is None}
    with no_bars():
        folder = Path(snapshot_download(name, allow_patterns=[*BELONGS, INDEX], **known))
    check(folder)
    names = set(weight_map(folder).values()) if (folder / INDEX).exists() else {SINGLE}
    return Path(snapshot_download(name, allow_patterns=sorted(names), **known))


def _fetch_config(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    revision = _newest_revision(name)
    with no_bars():
        known = {"revision": revision, "local_files_only": revision is None}
        return Path(hf_hub_download(name, "config.json", **known)).parent


def _newest_revision(name: str) -> str | None:
    """None if the Hub cannot be reached: then what is in the cache must do."""
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return HfApi().model_info(name, timeout=_SECONDS).sha
    except HfHubHTTPError:  # it can
        raise
    except (HTTPError, OSError):
        return None


@contextmanager
def no_bars() -> Iterator[None]:
    """Context in which ``huggingface_hub`` shows no progress bars."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    was_quiet = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not was_quiet:
            enable_progress_bars()
