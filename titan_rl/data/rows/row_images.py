"""Images of a data file's row: columns ``images`` (a list) and ``image``.

    Parquet, datasets    bytes, or {bytes, path} as ``datasets`` has them
    JSON lines           a data URI: "data:image/png;base64,..."

Nothing is fetched: paths and URLs are refused. In a row, images stand where its text says ``<image>``, or before it.
Errors are a ConfigError of one line with the row's place.
"""

import base64
import binascii
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.data.rows.row_fields import shown

IMAGES, IMAGE = "images", "image"
_URI, _BASE64 = "data:", ";base64,"


def as_uris(value: Any) -> Any:
    """Value of such a column of a table, with data URIs in the place of bytes."""
    if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
        value = value["bytes"]
    if isinstance(value, bytes):
        return f"{_URI}{_BASE64}{base64.b64encode(value).decode()}"
    return [as_uris(each) for each in value] if isinstance(value, list) else value


def take_images(place: str, columns: dict[str, Any]) -> tuple[tuple[bytes, ...], dict[str, Any]]:
    """Encoded images of a row, and its other columns. Errors: ConfigError."""
    there = [name for name in (IMAGES, IMAGE) if columns.get(name) is not None]
    if len(there) > 1:
        raise ConfigError(f"{place}: {IMAGES!r} and {IMAGE!r}: keep one of them")
    others = {name: value for name, value in columns.items() if name not in (IMAGES, IMAGE)}
    if not there:
        return (), others
    [name] = there
    value = columns[name]
    images = value if isinstance(value, list) else [value]
    return tuple(_image(f"{place}: {name!r}", each) for each in images), others


def _image(where: str, value: Any) -> bytes:
    mend = f"give bytes in Parquet, or a data URI ({_URI}image/png{_BASE64}...), or rename the column"
    if isinstance(value, dict) and value.get("path"):
        raise ConfigError(f"{where} holds a path, {shown(value['path'])}, and nothing is opened here: {mend}")
    if not isinstance(value, str):
        raise ConfigError(f"{where} holds {shown(value)}: {mend}")
    head, mark, data = value.partition(_BASE64)
    if not head.startswith(_URI) or not mark:
        raise ConfigError(f"{where} holds {shown(value)}, and nothing is fetched or opened here: {mend}")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError(f"{where} holds a data URI that is not base64: {error}") from None
