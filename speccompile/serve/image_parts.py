"""Images in the messages of a chat: parts of type ``image_url``, whose URL holds the image itself."""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from speccompile.serve.api_error import ApiError

if TYPE_CHECKING:
    from PIL import Image

IMAGE_URL = "image_url"
#: Largest number of pixels of an image. A small file can name any size.
MOST_PIXELS = 2**25
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)


def url_of(part: Mapping[str, Any]) -> str:
    """Return the data URL of a part ``{"type": "image_url", "image_url": {"url": ...}}``.

    Raises:
        ValueError: the part has no data URL.
    """
    given = part.get(IMAGE_URL)
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or _DATA_URL.match(url) is None:
        raise ValueError('the url of an image must be "data:image/...;base64,...": this server fetches no other URLs')
    return url


def decoded(url: str, param: str) -> Image.Image:
    """Decode the image of a data URL.

    Raises:
        ApiError: it is damaged, of an unknown format, or too large.
    """
    # Processors of images need Pillow, the server's other parts do not.
    from PIL import Image, UnidentifiedImageError

    try:
        data = base64.b64decode(url.partition(",")[2], validate=True)
        image = Image.open(io.BytesIO(data))
        if image.width * image.height > MOST_PIXELS:
            message = f"{param}: an image has {image.width} times {image.height} pixels, at most {MOST_PIXELS} are read"
            raise ApiError(message, param=param)
        return image.convert("RGB")
    except (binascii.Error, UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        # PIL raises SyntaxError for a damaged PNG.
        message = f"{param}: an image cannot be decoded ({type(error).__name__}); send the bytes of a file in base64"
        raise ApiError(message, param=param) from None
