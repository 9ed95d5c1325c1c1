"""Saved models on the Hugging Face hub, ``hf://owner/name[@revision]``; needs the extra ``hub``.

Only the files that the model's SHA256SUMS lists are downloaded, and each is verified.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from counterfoil.core.errors import CheckpointError, MissingExtraError
from counterfoil.core.progress import Progress
from counterfoil.core.storage.atomic import put_in_place, write_atomically
from counterfoil.core.storage.checksums import (
    MODEL_FILE,
    SUMS,
    SUMS_BYTES,
    check_sums,
    read_sums,
)
from counterfoil.core.storage.locks import locked_in_turn
from counterfoil.core.storage.reading import GIB, read_text

_PART = r"\w[\w.-]*"
HUB_ADDRESS = re.compile(rf"hf://?({_PART}/{_PART})(?:@({_PART}(?:/{_PART})*))?", re.ASCII)
"""Owner and name, and a branch, tag or commit. As a `Path`, it has lost one of its slashes."""

MAX_BYTES = 8 * GIB
"""Size of a model's files together."""

_COMMIT = re.compile("[0-9a-f]{40}")


def hub_library() -> Any:
    """The package `huggingface_hub`."""
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError:
        raise MissingExtraError("huggingface_hub", "hub", "a model on the hub") from None
    return huggingface_hub


def fetch_from_hub(address: str, cache: Path, progress: Progress) -> Path:
    """The folder of a model in the cache, downloaded if the hub has another version.

    If the hub cannot be reached or fails, the version that was downloaded last is used.
    """
    parts = HUB_ADDRESS.fullmatch(address)
    assert parts is not None  # noqa: S101 - the caller has looked
    repo, revision = parts[1], parts[2] or "main"
    address = f"hf://{repo}" + (f"@{parts[2]}" if parts[2] else "")
    folder = cache / "hub" / repo.replace("/", "--")
    if _COMMIT.fullmatch(revision) and (folder / revision).is_dir():
        return folder / revision
    hub = hub_library()
    seen = folder / f"{revision.replace('/', '--')}.commit"
    try:
        info = hub.HfApi().model_info(repo, revision=revision, files_metadata=True)
    except Exception as error:  # the package raises errors of several HTTP libraries
        return _last_copy(hub, error, address, seen, progress)
    target = folder / str(info.sha)
    with locked_in_turn(folder / ".lock", f"downloading {address}", progress):
        if not target.is_dir():
            sizes = {file.rfilename: file.size for file in info.siblings or ()}
            progress.say(f"downloading {address}")
            try:
                _download(hub, repo, target, sizes)
            except CheckpointError:
                raise
            except Exception as error:
                return _last_copy(hub, error, address, seen, progress)
        write_atomically(seen, target.name)
    return target


def _last_copy(hub: Any, error: Exception, address: str, seen: Path, progress: Progress) -> Path:
    """The version that was downloaded last, unless the hub refuses to give the model."""
    folder = seen.parent
    commit = read_text(seen, 100).strip() if seen.is_file() else ""
    if _says_no(hub, error) or not (folder / commit / SUMS).is_file():
        raise _refusal(hub, error, address, folder) from None
    progress.say(f"note: {address}: the hub cannot be reached; using the copy in {folder}")
    return folder / commit


def _download(hub: Any, repo: str, target: Path, sizes: dict[str, int | None]) -> None:
    """Download the files that SHA256SUMS lists beside ``target``, then rename the folder.

    An interrupted download leaves its folder, and the next one continues it.
    """
    new = target.with_name(f".{target.name}.part")
    new.mkdir(parents=True, exist_ok=True)

    def download(name: str) -> None:
        hub.hf_hub_download(repo, name, revision=target.name, local_dir=new)

    _check_size(repo, sizes, [SUMS], SUMS_BYTES)
    download(SUMS)
    names = sorted(read_sums(new / SUMS))
    if odd := [name for name in names if not MODEL_FILE.fullmatch(name)]:
        shutil.rmtree(new)
        raise CheckpointError(
            f"hf://{repo}: its {SUMS} lists '{odd[0]}', which no saved model consists of"
        )
    _check_size(repo, sizes, names, MAX_BYTES)
    for name in names:
        download(name)
    shutil.rmtree(new / ".cache", ignore_errors=True)  # notes of the hub's package
    try:
        check_sums(new)
    except CheckpointError as error:
        shutil.rmtree(new)
        raise CheckpointError(f"hf://{repo}: refused and deleted: {error}") from None
    put_in_place(new, target)


def _check_size(repo: str, sizes: dict[str, int | None], names: list[str], limit: int) -> None:
    if missing := [name for name in names if name not in sizes]:
        raise CheckpointError(
            f"hf://{repo}: not a saved model of Counterfoil (no {missing[0]} there); push one with "
            "counterfoil push RUN owner/name"
        )
    if (size := sum(sizes[name] or 0 for name in names)) > limit:
        raise CheckpointError(f"hf://{repo}: {size:,} bytes, at most {limit:,} are downloaded")


def _says_no(hub: Any, error: Exception) -> bool:
    """Whether the hub answered: no such model, no such revision, no access.

    Other errors, such as 429 (too many requests) and 503, are no answer about the model.
    """
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status in (401, 403, 404) or isinstance(error, hub.errors.HFValidationError)


def _refusal(hub: Any, error: Exception, address: str, folder: Path) -> CheckpointError:
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    if _says_no(hub, error):
        return CheckpointError(
            f"{address}: refused by the hub ({reason}); check the name and the revision, and for a "
            "private model log in with: hf auth login"
        )
    return CheckpointError(
        f"{address}: the hub cannot be reached ({reason}); run it again later with a network "
        "connection, or copy the model's folder from another machine and name that folder "
        f"(downloads are kept in {folder})"
    )
