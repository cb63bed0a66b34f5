"""Reading of the files of a drafter's checkpoint, from a folder or the hub."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from speccompile.errors import HeadKeys, InvalidHead, InvalidInput, error_line
from speccompile.sampling.draft_vocab import check_d2t, target_ids

#: The files that are fetched from a repository on the hub.
CHECKPOINT_FILES = ("config.json", "*.safetensors", "pytorch_model.bin")

#: Floating-point dtypes without scales. (float8 weights have scales.)
DENSE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
#: A missing key is reported together with an unknown one of at least this similarity.
MIN_SIMILARITY = 0.6


def checkpoint_folder(source: str | Path, patterns: Sequence[str]) -> Path:
    """The folder ``source``, or the folder of the hub's repository with this id. Only files of these patterns are
    fetched.

    Raises:
        InvalidHead: it is not a folder, and cannot be fetched.
    """
    path = Path(source)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(source), allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = f"it is not a folder, and cannot be fetched from the Hugging Face Hub ({error_line(error)})"
        raise InvalidHead(source=str(source), reason=reason) from error


def read_tensors(
    folder: Path, name: str, *, binaries: Sequence[str] = ("pytorch_model.bin",)
) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files in ``folder``. Without such files, the tensors of the first of ``binaries``
    that exists.

    Args:
        name: the checkpoint's name, for messages.

    Raises:
        InvalidHead: there are no tensors, a file cannot be read, or a tensor is in two files.
    """
    files = sorted(folder.glob("*.safetensors"))
    binary = next((folder / file for file in binaries if (folder / file).exists()), None)
    found: dict[str, torch.Tensor] = {}
    try:
        for file in files:
            read = load_file(file)
            if twice := sorted(found.keys() & read.keys()):
                raise InvalidHead(source=name, reason=f"{twice[0]!r} is in {file.name} and in another file as well")
            found |= read
        if not files and binary is not None:
            found = dict(torch.load(binary, map_location="cpu", weights_only=True))
    except InvalidHead:
        raise
    except Exception as error:
        raise InvalidHead(source=name, reason=f"its weights cannot be read: {error_line(error)}") from error
    for key, value in found.items():
        if not isinstance(value, torch.Tensor):
            raise InvalidHead(source=name, reason=f"{key!r} must be a tensor, got a {type(value).__name__}")
    if not found:
        raise InvalidHead(source=name, reason=f"there is neither a *.safetensors nor a {' or '.join(binaries)} in it")
    return found


def renamed(
    tensors: Mapping[str, torch.Tensor], rules: Sequence[tuple[str, str]], name: str
) -> dict[str, torch.Tensor]:
    """``tensors`` by the head's names for them.

    Args:
        rules: patterns and their replacements, applied in this order.
        name: the checkpoint's name, for messages.

    Raises:
        InvalidHead: two keys name one tensor.
    """
    given: dict[str, str] = {}
    found: dict[str, torch.Tensor] = {}
    for key, value in tensors.items():
        own = key
        for pattern, replacement in rules:
            own = re.sub(pattern, replacement, own)
        if own in found:
            raise InvalidHead(source=name, reason=f"{given[own]!r} and {key!r} are two names of one tensor")
        found[own], given[own] = value, key
    return found


def check_tensors(
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, tuple[int, ...]],
    name: str,
    *,
    optional: Collection[str] = (),
    integers: Collection[str] = (),
) -> None:
    """Check that ``tensors`` has all expected tensors, with their shapes, and no others.

    Args:
        expected: shapes by key.
        name: the checkpoint's name, for messages.
        optional: expected keys that may be missing.
        integers: keys of tensors that do not hold floating-point numbers.

    Raises:
        HeadKeys: keys are missing, not known, renamed, or of another shape or dtype. The message lists them.
    """
    missing = {key for key in expected if key not in tensors and key not in optional}
    problems: list[str] = []
    for key in (key for key in tensors if key not in expected):
        shape = tuple(tensors[key].shape)
        likely = _closest_key(key, [other for other in missing if expected[other] == shape])
        if likely is None:
            problems.append(f"not known: {key} {list(shape)}")
        else:
            missing.discard(likely)
            problems.append(f"renamed: {key} {list(shape)} looks like {likely}")
    problems += [f"missing: {key} {list(expected[key])}" for key in expected if key in missing]
    for key, shape in expected.items():
        if key in tensors and tuple(tensors[key].shape) != shape:
            problems.append(f"of another shape: {key} is {list(tensors[key].shape)} and must be {list(shape)}")
        elif key in tensors and key not in integers and tensors[key].dtype not in DENSE:
            problems.append(f"of another kind: {key} is {tensors[key].dtype} and must hold floating-point numbers")
    if problems:
        raise HeadKeys(source=name, problems="".join(f"\n  {problem}" for problem in problems))


def _closest_key(key: str, others: Iterable[str]) -> str | None:
    found = difflib.get_close_matches(key, list(others), n=1, cutoff=MIN_SIMILARITY)
    return found[0] if found else None


def check_vocabulary(
    d2t: torch.Tensor | None, t2d: torch.Tensor | None, draft_vocab_size: int, vocab_size: int, name: str
) -> None:
    """Check the draft vocabulary of a head.

    Args:
        d2t: int64 ``[Vd]``, the offset of each draft token's id; t2d: bool ``[V]``, the tokens that can be drafted;
            None if the checkpoint has none.
        draft_vocab_size: Vd; vocab_size: V, the target's.
        name: the checkpoint's name, for messages.

    Raises:
        InvalidHead: a draft token is not a token of the target, two are the same one, or ``t2d`` marks others.
        HeadKeys: ``t2d`` is of another shape.
    """
    if d2t is None:
        d2t = torch.zeros(draft_vocab_size, dtype=torch.int64)
    try:
        check_d2t(d2t, vocab_size)
    except InvalidInput as error:
        raise InvalidHead(source=name, reason=str(error).rstrip(".")) from error
    if draft_vocab_size == vocab_size and bool(d2t.any()):
        raise InvalidHead(source=name, reason="its d2t must be 0 for a head with the whole vocabulary")
    if t2d is None:
        return
    if tuple(t2d.shape) != (vocab_size,):
        raise HeadKeys(
            source=name, problems=f"\n  of another shape: t2d is {list(t2d.shape)} and must be {[vocab_size]}"
        )
    drafted = torch.zeros(vocab_size, dtype=torch.bool)
    drafted[target_ids(d2t.long())] = True
    if not torch.equal(drafted, t2d.bool()):
        raise InvalidHead(source=name, reason="its t2d does not mark the tokens that its d2t names")
