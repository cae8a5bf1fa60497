"""Plot of a run that is redrawn in its notebook cell while the run continues."""

import asyncio
from collections.abc import Callable
from typing import Any

_SECONDS = 1.0


class LivePlot:
    """Plot that redraws itself in its cell. ``stop`` leaves the current picture."""

    def __init__(self, draw: Callable[[], Any], state: Callable[[], Any], is_over: Callable[[], bool]):
        """``draw()`` gives the picture; it is called again when ``state()`` is another, until the run ``is_over``, and
        then once more."""
        self._draw, self._state, self._is_over = draw, state, is_over
        self._following: asyncio.Task[None] | None = None

    def _ipython_display_(self) -> None:
        from IPython.display import display

        self.stop()
        drawn = self._state()
        shown = display(self._draw(), display_id=True)
        self._following = asyncio.ensure_future(self._follow(shown, drawn))

    async def _follow(self, shown: Any, drawn: Any) -> None:
        while not self._is_over():
            await asyncio.sleep(_SECONDS)
            if (state := self._state()) != drawn:
                drawn = state
                picture = self._draw()
                # a figure takes longer than the run should wait, and keeps what this gives
                await asyncio.to_thread(getattr(picture, "_repr_png_", lambda: None))
                shown.update(picture)

    def stop(self) -> None:
        if self._following is not None:
            self._following.cancel()
