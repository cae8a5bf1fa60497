"""Images of a prompt as HTML: PNG made here of recorded pixels, in data URLs, which the page's policy permits."""

import base64
import io
from collections.abc import Sequence
from html import escape

from titan_rl.data.images import PlacedImage, sizes_in_words

_MOST_IMAGES = 8
_LARGEST, _SMALLEST = 512, 128
"""Pixels of a side: a larger image is made smaller, and a smaller one is shown larger."""


def images_html(images: Sequence[PlacedImage]) -> str:
    """The first images of a prompt, with the sizes that the model sees; empty without any."""
    if not images:
        return ""
    shown = "".join(map(_image, images[:_MOST_IMAGES]))
    return (
        f'<div class="soft q-mt-sm">images</div><div class="images">{shown}</div>'
        f'<div class="soft">{escape(sizes_in_words(images))}</div>'
    )


def _image(image: PlacedImage) -> str:
    from PIL import Image

    small, file = Image.fromarray(image.pixels), io.BytesIO()
    small.thumbnail((_LARGEST, _LARGEST))
    small.save(file, "PNG")
    larger = max(1, _SMALLEST // max(small.size))
    width, height = (side * larger for side in small.size)
    data = base64.b64encode(file.getvalue()).decode()
    words = escape(sizes_in_words([image]))
    return f'<img src="data:image/png;base64,{data}" width="{width}" height="{height}" alt="{words}">'
