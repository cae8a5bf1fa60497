"""What a user is told of a configuration that is wrong."""

from collections.abc import Iterable

import pytest

from titan_rl.config.load import ConfigError, load_config
from titan_rl.controller.preflight.checks import check


def assert_one_line(tables: dict, words: Iterable[str]) -> None:
    """The configuration is refused in one line that has all of these words."""
    with pytest.raises(ConfigError) as caught:
        check(load_config(None, tables))
    said = str(caught.value)
    assert "\n" not in said and all(word in said for word in words), said
