"""Models of the Hugging Face Hub, by the id `ORG/NAME`: from its local cache, else downloaded.

`resolver` calls it. Only weights in safetensors, configurations and tokenizers are downloaded. The
cache, tokens and offline mode (`HF_HUB_OFFLINE`) are those of `huggingface_hub`.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from foretoken.errors import ModelError
from foretoken.models.folder import check_folder
from foretoken.models.guard import guarded

__all__ = ["hub_folder", "is_hub_id"]

_log = logging.getLogger(__name__)

_WORD = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?"
_ID = re.compile(rf"{_WORD}/{_WORD}(@[\w./-]+)?")

_WANTED = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_UNWANTED = ["*/*", "consolidated*.safetensors"]  # copies in other layouts


def is_hub_id(name: str) -> bool:
    """Whether a name has the form `ORG/NAME` or `ORG/NAME@REVISION`."""
    return _ID.fullmatch(name) is not None


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
    from huggingface_hub import constants, errors

    failure = f"there is no folder {repository!r}, and the Hugging Face Hub does not give the model"
    with guarded(failure):
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
        raise ModelError(f"{failure}: {why}")
