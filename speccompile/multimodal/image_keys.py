"""The image in each place of a prompt, by the content of its pixels.

Beside a second image, an image has embeddings that differ in their last bits: libraries choose kernels by the size of a
batch. So an earlier turn of a conversation is found again by what was given, not by what the model computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch

from speccompile.multimodal.model_inputs import is_per_token

#: A key of the image, and the number of the place among the image's own.
ImagePlace = tuple[bytes, int]
#: Inputs whose rows are patches of all images, and the input whose row is the number of an image's patches in time,
#: height and width. Source: the forward of transformers' Qwen2-VL, modeling_qwen2_vl.py.
_PATCHES, _GRID = "pixel_values", "image_grid_thw"


def image_places(given: Mapping[str, Any], embedded: torch.Tensor) -> list[list[ImagePlace]] | None:
    """The image in each place of each row that has an embedding, ascending.

    Args:
        given: inputs by the name of the forward's parameter.
        embedded: bool ``[B, P]``.

    Returns:
        None if the images are not known: an input has no row for each, or runs of places are not as long as images of
        these sizes are.
    """
    inputs = {name: value for name, value in given.items() if value is not None and not is_per_token(name)}
    if not all(isinstance(value, torch.Tensor) and value.ndim for value in inputs.values()):
        return None
    runs = [_run_lengths(row) for row in embedded]
    lengths = torch.tensor([length for of_row in runs for length in of_row])
    count = len(lengths)
    rows = {name: _rows_of_images(name, value, inputs, count) for name, value in inputs.items()}
    if any(of_images is None for of_images in rows.values()):
        return None
    # One image with a break among its places, or two without one between them, would be other images.
    patches = inputs[_GRID].cpu().prod(dim=-1) if _GRID in inputs else torch.ones_like(lengths)
    if not torch.equal(lengths * patches.sum(), patches * lengths.sum()):
        return None
    keys = iter([_key({name: rows[name][image] for name in sorted(rows)}) for image in range(count)])  # type: ignore[index]
    return [[(key, place) for length in of_row for key in [next(keys)] for place in range(length)] for of_row in runs]


def _run_lengths(row: torch.Tensor) -> list[int]:
    """Lengths of the runs of True in ``row`` ``[P]``."""
    padded = torch.nn.functional.pad(row.to(torch.int8), (1, 1)).diff()
    return ((padded == -1).nonzero()[:, 0] - (padded == 1).nonzero()[:, 0]).tolist()


def _rows_of_images(
    name: str, value: torch.Tensor, inputs: Mapping[str, torch.Tensor], count: int
) -> Sequence[torch.Tensor] | None:
    """The part of an input that belongs to each of ``count`` images."""
    grid = inputs.get(_GRID)
    if name == _PATCHES and grid is not None:
        sizes = grid.prod(dim=-1).tolist() if grid.ndim == 2 else []
        return value.split(sizes) if len(sizes) == count and sum(sizes) == len(value) else None
    return value.split(1) if len(value) == count else None


def _key(parts: Mapping[str, torch.Tensor]) -> bytes:
    digest = blake2b(digest_size=16)
    for name, part in parts.items():
        digest.update(f"{name} {part.dtype} {tuple(part.shape)} ".encode())
        digest.update(part.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()
