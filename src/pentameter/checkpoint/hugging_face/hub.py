"""Models on the Hugging Face Hub: fetched into its cache, and pushed, through `huggingface_hub`.

The library's settings apply: the Hub's address (HF_ENDPOINT), the login (HF_TOKEN, `hf auth login`)
and the cache folder (HF_HOME). Nothing but configuration, safetensors and tokenizer files is
fetched, and a fetched file counts only with the size and, if the Hub gives it, the sha256 that the
Hub records.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentameter.disk.atomic import sha256_of, storage_errors
from pentameter.disk.retrying import growing, retried
from pentameter.errors import (
    ConfigError,
    CorruptError,
    PentameterError,
    StorageError,
    missing_package,
    printable,
)

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MODEL_FILES = (
    *("config.json", "generation_config.json"),
    *("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model"),
    *("chat_template.jinja", "additional_chat_templates/*.jinja"),
)
"""Patterns of the files of a repository to fetch: those that `read_hf` reads."""
ATTEMPTS = 3
FIRST_WAIT_SECONDS = 1.0
"""Wait before the second attempt; doubled before the third."""
REPLACED = ("model*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")
"""Patterns for weight files that a push removes from the repository if the pushed folder lacks
them."""

_ADDRESS = re.compile(
    r"(?P<scheme>hf:/{1,2})?(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?"
)


@dataclass(frozen=True)
class HubAddress:
    """A model repository on the Hub, `OWNER/NAME` or `OWNER/NAME@REVISION`."""

    repository: str
    revision: str | None = None
    """A branch, a tag or a commit; None for the main branch."""

    def __str__(self) -> str:
        return self.repository + (f"@{self.revision}" if self.revision else "")


def hub_address(model: Path | str, *, scheme: bool = True) -> HubAddress | None:
    """Parse `hf://OWNER/NAME[@REVISION]`, also as a Path, in which `//` has become `/`. Return None
    if `model` is no such address.

    With `scheme` false, `OWNER/NAME[@REVISION]` is an address, too, unless that path, or a folder
    OWNER, exists in the working directory.
    """
    found = _ADDRESS.fullmatch(str(model))
    if found is None:
        return None
    is_here = Path(model).exists() or Path(model).parent.exists()
    if found["scheme"] is None and (scheme or is_here):
        return None
    return HubAddress(found["repository"], found["revision"])


def local_model(model: Path, warnings: list[str]) -> Path:
    """Return the folder of `model`: for `hf://…` its copy in the Hub's cache, downloaded if
    missing; any other path unchanged. `warnings` gets a line if the Hub does not answer. Raises
    ConfigError, StorageError or CorruptError if the download fails."""
    address = hub_address(model)
    return model if address is None else fetch(address, warnings)


def fetch(address: HubAddress, warnings: list[str]) -> Path:
    """Return the folder, in the Hub's cache, of a model's files; those that are missing there are
    downloaded now.

    If the Hub does not answer, or HF_HUB_OFFLINE is set, a copy in the cache is returned, and a
    line is added to `warnings`. Raises ConfigError if huggingface_hub, the repository or the
    revision is missing, and for one without config.json or safetensors; StorageError if the Hub
    refuses or fails, or is out of reach and no copy is in the cache; CorruptError for files of
    another size or content than the Hub says.
    """
    api = _api()
    folder = _downloaded(address)
    try:
        info = api.model_info(address.repository, revision=folder.name, files_metadata=True)
    except Exception as error:  # each release of the library has errors of another HTTP client
        if (_status(error) or 500) < 500:
            raise _failure(address, error) from error
        warnings.append(f"the Hub does not answer; {address} is the copy in {folder}")
        return folder
    files = {file.rfilename: file for file in info.siblings or ()}
    names = [name for name in files if any(fnmatchcase(name, each) for each in MODEL_FILES)]
    _check_names(address, files.keys())
    for name in names:
        _check(folder / name, files[name])
    return folder


def _downloaded(address: HubAddress) -> Path:
    """Return the folder, named by its commit, of a model's files in the cache, downloaded where
    they are missing. The library resumes broken connections; this function asks again, up to
    ATTEMPTS times, if the server fails or sends too little."""
    from huggingface_hub import snapshot_download

    def ask() -> str:
        return snapshot_download(
            address.repository, revision=address.revision, allow_patterns=list(MODEL_FILES)
        )

    return Path(
        retried(
            ask,
            growing(FIRST_WAIT_SECONDS, ATTEMPTS - 1),
            lambda error, _: _failure(address, error),
            # A plain OSError is what the library raises for a file of another size.
            may_pass=lambda error: (_status(error) or 0) >= 500 or type(error) is OSError,
        )
    )


def push(folder: Path, repository: str, *, private: bool) -> str:
    """Upload a folder's files as one commit on the main branch of a model repository; return the
    commit's URL. An absent repository is made, private if `private` is true. Weights of an earlier
    push that are not replaced are removed.

    Raises ConfigError if huggingface_hub is missing, and if `private` is true for a repository that
    is public; StorageError if the Hub refuses or fails. The commit is made whole or not at all.
    """
    api, address = _api(), HubAddress(repository)
    try:
        api.create_repo(repository, private=private or None, exist_ok=True)
        if private and api.model_info(repository).private is False:
            raise ConfigError(
                f"{repository} exists and is public, and --private asks for a private one: make "
                "it private in its settings, or choose another name; nothing was uploaded"
            )
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Upload a model from pentameter",
            delete_patterns=list(REPLACED),
        )
    except PentameterError:
        raise
    except Exception as error:
        raise _failure(address, error) from error
    return commit.commit_url


def check_login(repository: str) -> None:
    """Raise ConfigError if huggingface_hub is missing or `repository` is not OWNER/NAME;
    StorageError unless the Hub accepts the login. Called before a push, so that it fails before
    gigabytes are written."""
    address = hub_address(f"hf://{repository}")
    if address is None or address.revision is not None:
        raise ConfigError(f"--push {printable(repository)} is not OWNER/NAME")
    try:
        _api().whoami()
    except PentameterError:
        raise
    except Exception as error:
        raise _failure(address, error) from error


def _api() -> HfApi:
    """Return the Hub's client; progress bars appear only on a terminal. Raises ConfigError if
    huggingface_hub is not installed."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars, logging
    except ImportError as error:
        raise missing_package("the Hugging Face Hub", "huggingface_hub", "hub") from error
    logging.set_verbosity_error()  # whatever ends badly is said here, once
    if not sys.stderr.isatty():
        disable_progress_bars()
    return HfApi(library_name="pentameter")


def _check_names(address: HubAddress, names: Collection[str]) -> None:
    """Raise ConfigError if a repository's file names lack config.json or safetensors weights, or
    are adapters alone."""
    if "adapter_config.json" in names and "config.json" not in names:
        raise ConfigError(f"{address} on the Hub holds adapters alone, which `peft` opens")
    weights = ("model.safetensors", "model.safetensors.index.json")
    lacks = "config.json" if "config.json" not in names else weights[0]
    if "config.json" not in names or not any(name in names for name in weights):
        raise ConfigError(
            f"{address} on the Hub has no {lacks}; other files are not fetched, as a pickle can "
            "run code when it is opened"
        )


def _check(path: Path, file: Any) -> None:
    """Raise CorruptError unless the fetched file `path` has the size and the sha256 in `file`, the
    Hub's record of it; values that the record lacks are not checked."""
    with storage_errors(path, "read"):
        n_bytes = path.stat().st_size
        is_whole = file.size in (None, n_bytes)
    if is_whole and file.lfs is not None:
        is_whole = sha256_of(path) == file.lfs.sha256
    if not is_whole:
        raise CorruptError(
            f"{path} is not the file on the Hub (it has {n_bytes:,} bytes); delete "
            f"{path.resolve()} and start again"
        )


def _status(error: BaseException) -> int | None:
    """Return the HTTP status in an error or its causes; None if the server did not answer."""
    at: BaseException | None = error
    while at is not None:
        status = getattr(getattr(at, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
        at = at.__cause__
    return None


_LOGIN = "`hf auth login`, or HF_TOKEN"
_REFUSALS = {
    401: f"the Hub does not know who asks, or has no such repository; log in with a valid token "
    f"({_LOGIN})",
    403: f"the Hub forbids it; use a token that has the right ({_LOGIN})",
    404: f"it is not on the Hub, or is private; check the name, or log in ({_LOGIN})",
}
"""HTTP status → its meaning and the remedy, for the error message."""


def _failure(address: HubAddress, error: Exception) -> PentameterError:
    """Return the error to raise for a failed request about the repository `address`: ConfigError if
    the Hub answers with 404, else StorageError. Its message names the repository, the reason and a
    remedy."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        LocalTokenNotFoundError,
        RevisionNotFoundError,
    )

    status = 401 if isinstance(error, LocalTokenNotFoundError) else _status(error)
    # That no copy is in the cache either, is said of every reason why the Hub was not heard.
    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
    root = cause or error
    said = printable(f"{type(root).__name__}: {' '.join(str(root).split())}")[:200]
    if isinstance(error, GatedRepoError):
        reason = (
            f"it is gated: accept its conditions on its page on the Hub, then log in ({_LOGIN})"
        )
    elif isinstance(error, RevisionNotFoundError):
        reason = "the repository has no such revision"
    elif status == 400:
        reason = f"the Hub refuses it ({said})"
    elif status is not None:
        reason = _REFUSALS.get(
            status, f"the Hub answers with HTTP status {status}; try again later"
        )
    else:
        reason = f"the Hub does not answer, or broke off ({said}); check the network and try again"
    kind = ConfigError if status == 404 else StorageError
    return kind(f"{address}: {reason}")
