"""Models of the Hugging Face Hub, by the id `ORG/NAME`: from its local cache, else downloaded.

`resolver` calls it. Only weights in safetensors, configurations and tokenizers are downloaded. The
cache, tokens and offline mode (`HF_HUB_OFFLINE`) are those of `huggingface_hub`.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from tokenleap.errors import ModelError
from tokenleap.models.disk import full_disk, tells_of_full_disk
from tokenleap.models.folder import check_folder

__all__ = ["hub_folder", "is_hub_id"]

_log = logging.getLogger(__name__)

_WORD = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_ID = re.compile(rf"(?!.*(?:--|\.\.|\.git$|\.git@))({_WORD}/{_WORD})(?:@([A-Za-z0-9][\w./-]*))?")

_WEIGHTS = ["model.safetensors", "model-*.safetensors"]  # and no variants, copies or adapters
_WANTED = [*_WEIGHTS, "*.json", "*.model", "*.spm", "*.jinja", "*.txt"]
_UNWANTED = ["*/*"]  # copies in other layouts


def is_hub_id(name: str) -> bool:
    """Whether a name has the form `ORG/NAME` or `ORG/NAME@REVISION`."""
    return len(name) <= 96 and _ID.fullmatch(name) is not None


def hub_folder(name: str) -> Path:
    """The folder of a model of the Hub.

    A model that is in the local cache is used as it is there, without asking for a newer one.

    Args:
        name: `ORG/NAME`, or `ORG/NAME@REVISION` for a branch, a tag or a commit.

    Raises:
        ModelError: there is no such model, it cannot be fetched, or it has no safetensors.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository, _, revision = name.partition("@")
    try:
        folder = _snapshot(repository, revision or None, local=True)
        check_folder(folder)
    except (LocalEntryNotFoundError, ModelError):
        _log.info("downloading %s", name)
        folder = _downloaded(repository, revision or None)
        if not any(folder.glob("*.safetensors")):
            raise ModelError(
                f"{repository!r} has no weights in safetensors on the Hugging Face Hub: convert "
                "them first, or use another repository of the model"
            ) from None
        check_folder(folder)
    return folder


def _snapshot(repository: str, revision: str | None, *, local: bool) -> Path:
    from huggingface_hub import HfApi

    return Path(
        HfApi().snapshot_download(
            repository,
            revision=revision,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            local_files_only=local,
        )
    )


def _downloaded(repository: str, revision: str | None) -> Path:
    """Download a model, with the progress bars of `huggingface_hub`."""
    from huggingface_hub import constants, errors

    try:
        return _snapshot(repository, revision, local=False)
    except errors.GatedRepoError:
        why = "agree to its licence on its page there, and log in with `hf auth login`"
    except errors.RevisionNotFoundError:
        why = f"it has no revision {revision!r}"
    except errors.RepositoryNotFoundError:
        why = "it has none of this name, or it is private (`hf auth login`)"
    except errors.LocalEntryNotFoundError:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "it cannot be reached"
        why = f"{reason}, and the model is not in the local cache"
    except Exception as error:
        if tells_of_full_disk(str(error)):
            raise full_disk() from error
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise ModelError(
        f"there is no folder {repository!r}, and the Hugging Face Hub does not give the model: "
        f"{why}"
    )
