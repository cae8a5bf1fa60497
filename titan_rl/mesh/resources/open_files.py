"""How many files and connections a process may have open: as many as its user may allow it."""

import resource
from functools import cache

from titan_rl.config.load import ConfigError

_MOST = 1 << 20
"""More are of no use to a run, and slow down programs that go through all numbers."""
_LEAST = 256
"""A run on one machine has about a hundred open at once."""


@cache
def raise_open_files() -> str:
    """Raise the soft limit of this process, and of those that it starts, to the hard one; in words if it was lower.

    Errors: ConfigError for one that no run could do with."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if limit < _LEAST:
        raise ConfigError(f"a process may have {limit} open files here (`ulimit -Hn`), and needs {_LEAST}: raise that")
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return ""
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return f"open files: each process of the run may have {limit}, as the hard limit says (it was {soft})"
