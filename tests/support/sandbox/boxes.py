"""Boxes for programs that a model wrote, where this machine can have them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from titan_rl.config.load import ConfigError
from titan_rl.environments.sandbox.pool import check_sandbox


def need_boxes() -> None:
    """Skips, with the reason, where there are none."""
    try:
        check_sandbox()
    except ConfigError as error:
        pytest.skip(str(error))


@contextmanager
def own_images(tmp_path_factory) -> Iterator[None]:
    """Boxes whose workspaces have a store of images of their own; skips where there are none."""
    need_boxes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
