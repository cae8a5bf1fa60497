"""A headless Chromium for a page of ours: Debian's, or one that playwright brought."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from titan_rl.config.load import ConfigError

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = [
    *("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-proxy-server"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
"""The last: what wants anything but loopback fails, and is seen."""


def why_no_browser() -> str:
    """Empty where there is one."""
    if find_spec("playwright") is None:
        return "playwright is not installed: pip install playwright"
    if next(filter(None, map(shutil.which, _NAMES)), None) is None:
        return "no Chromium is installed: apt-get install chromium"
    return ""


@contextmanager
def browser_page(width: int = 1440, height: int = 920, *, dark: bool = False) -> Iterator[Any]:
    """Playwright page, with its console errors in ``page.errors``. Errors: ConfigError."""
    if why := why_no_browser():
        raise ConfigError(why)
    from playwright.sync_api import ViewportSize, sync_playwright

    path = next(filter(None, map(shutil.which, _NAMES)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_FLAGS)
        try:
            size = ViewportSize(width=width, height=height)
            page: Any = browser.new_page(viewport=size, color_scheme="dark" if dark else "light")
            page.errors, page.elsewhere = [], []
            page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
            page.on("request", lambda request: _note(page.elsewhere, request.url))
            yield page
        finally:
            browser.close()


def _note(elsewhere: list[str], url: str) -> None:
    if not url.startswith(("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:")):
        elsewhere.append(url)
