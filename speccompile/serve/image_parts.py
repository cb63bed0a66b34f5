"""Images in the messages of a chat: parts of type ``image_url``."""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import ProcessorMixin

from speccompile.serve.api_error import ApiError
from speccompile.serve.fetched_images import fetched, is_fetched

if TYPE_CHECKING:
    from PIL import Image

IMAGE_URL = "image_url"
#: Largest number of pixels of an image. A small file can name any size.
MOST_PIXELS = 2**25
#: Formats of Pillow that are read. Others may run programs (EPS) or read other files.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)


def url_of(part: Mapping[str, Any]) -> str:
    """Return the URL of a part ``{"type": "image_url", "image_url": {"url": ...}}``.

    Raises:
        ValueError: the part has no URL that holds an image, or of the web.
    """
    given = part.get(IMAGE_URL)
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not (_DATA_URL.match(url) or is_fetched(url)):
        raise ValueError('the url of an image must be "data:image/...;base64,..."')
    return url


@dataclass(frozen=True)
class ImageReader:
    """Reads images of messages for a model that has a processor.

    Args:
        fetches: whether http and https URLs are read, too.
        most_bytes: of a file that is fetched.
    """

    processor: ProcessorMixin
    fetches: bool
    most_bytes: int

    def read(self, url: str, param: str) -> Image.Image:
        """Read the image of a URL of :func:`url_of`.

        Raises:
            ApiError: it is damaged, of an unknown format, or too large, or its URL is not read.
        """
        if not is_fetched(url):
            return decoded(url.partition(",")[2], param)
        if not self.fetches:
            message = f"{param}: this server fetches no URLs (--image-urls); send the image in a data URL"
            raise ApiError(message, param=param)
        return opened(fetched(url, self.most_bytes, param), param)


def decoded(text: str, param: str) -> Image.Image:
    """Decode an image in base64.

    Raises:
        ApiError: it is damaged, of an unknown format, or too large.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(f"{param}: the data of an image is not base64", param=param) from None
    return opened(data, param)


def opened(data: bytes, param: str) -> Image.Image:
    """Decode the bytes of an image's file.

    Raises:
        ApiError: it is damaged, of an unknown format, or too large.
    """
    # Processors of images need Pillow, the server's other parts do not.
    from PIL import Image, ImageOps, UnidentifiedImageError

    # All formats are known then.
    Image.init()
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height > MOST_PIXELS:
            message = f"{param}: an image has {image.width} times {image.height} pixels, at most {MOST_PIXELS} are read"
            raise ApiError(message, param=param)
        # As transformers' load_image turns it.
        return ImageOps.exif_transpose(image).convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        # PIL raises SyntaxError for a damaged PNG.
        message = (
            f"{param}: an image cannot be decoded ({type(error).__name__}); send a whole file: {', '.join(FORMATS)}"
        )
        raise ApiError(message, param=param) from None
