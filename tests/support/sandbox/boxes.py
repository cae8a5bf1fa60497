"""Boxes for programs that a model wrote, where this machine can have them."""

import pytest

from titan_rl.config.load import ConfigError
from titan_rl.environments.sandbox.pool import check_sandbox


def need_boxes() -> None:
    """Skips, with the reason, where there are none."""
    try:
        check_sandbox()
    except ConfigError as error:
        pytest.skip(str(error))
