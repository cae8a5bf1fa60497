"""Prints pip's settings as uv's environment variables, one a line; ``scripts/install.sh`` resolves by uv with these.

Reads ``pip config list`` from standard input. Ends with 1 where a setting has no counterpart: pip is to be used then.
"""

import shlex
import sys

NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "no-index": "UV_NO_INDEX",
    "cert": "SSL_CERT_FILE",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "cache-dir": "UV_CACHE_DIR",
}
SEPARATORS = {"UV_FIND_LINKS": ","}
"""Of lists; a space otherwise."""
IGNORED = {"disable-pip-version-check", "no-input", "progress-bar", "quiet", "verbose", "root-user-action", "no-color"}
ORDER = ("global", "user", "site", "install", ":env:")
"""Sections and sources of pip's settings, the later ones over the earlier; those of other commands do not count."""


def settings_of(listing: str) -> dict[str, str]:
    """What holds for ``pip install``, by the name of the setting."""
    lines = [line.partition("=") for line in listing.splitlines() if "=" in line]
    found = [(*key.rpartition(".")[::2], shlex.split(value)[0] if value.strip() else "") for key, _, value in lines]
    ranked = sorted((ORDER.index(section), name, value) for section, name, value in found if section in ORDER)
    return {name: value for _, name, value in ranked}


def as_uv(settings: dict[str, str]) -> list[str]:
    """``NAME=value`` for each setting. Errors: SystemExit if one has no counterpart."""
    if unknown := settings.keys() - NAMES.keys() - IGNORED:
        raise SystemExit(f"uv has no counterpart of pip's {', '.join(sorted(unknown))}")
    known = ((NAMES[name], value.split()) for name, value in settings.items() if name in NAMES)
    return [f"{name}={SEPARATORS.get(name, ' ').join(parts)}" for name, parts in known]


if __name__ == "__main__":
    print("\n".join(["UV_INDEX_STRATEGY=unsafe-best-match", *as_uv(settings_of(sys.stdin.read()))]))
