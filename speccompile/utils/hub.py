"""Whether the hub can be reached for a model, by one request instead of half a minute of retries."""

from __future__ import annotations

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, FileMetadataError, HfHubHTTPError, HTTPError

from speccompile.errors import PretrainedError, error_line

_FILE = "config.json"


def check_reachable(repo_id: str) -> None:
    """Check that ``repo_id`` is in the cache of huggingface_hub, or that the hub answers. Whether the hub has such a
    model is not checked. A slow answer is left to huggingface_hub, which waits longer.

    Raises:
        PretrainedError: neither holds.
    """
    if isinstance(try_to_load_from_cache(repo_id, _FILE), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(repo_id, _FILE))
    except (HfHubHTTPError, EntryNotFoundError, FileMetadataError):
        # The hub has answered; transformers reports what is wrong with the model.
        return
    except (HTTPError, OSError) as error:
        if _is_timeout(error):
            return
        raise PretrainedError(
            f"cannot load {repo_id!r}: there is no such folder, it is not in the cache of huggingface_hub, and the hub "
            f"cannot be reached ({error_line(error)}).",
            source=repo_id,
            reason=f"the hub cannot be reached: {error_line(error)}",
        ) from error


def _is_timeout(error: Exception) -> bool:
    # By name: versions of huggingface_hub differ in the HTTP client that they use.
    return any(kind.__name__ == "TimeoutException" for kind in type(error).__mro__)
