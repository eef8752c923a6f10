"""Folders by path or hub id: where models and datasets come from.

What exists on this machine is used as it is. Anything else is asked of the Hugging Face hub, but only if it is written as
a hub id (`org/name` or `name`), and only for a few seconds: without a network the local hub cache answers, or nothing does.
"""

from __future__ import annotations

import difflib
import re
import threading
from pathlib import Path
from typing import Literal

from drumroll.errors import UserError

ANSWER_WITHIN_S = 4.0
"""How long the hub may take to say which commit a revision is. Downloads that follow may take as long as they need."""

# What training and tokenizing need. Repositories often hold the same weights once more in other formats.
MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]
MODEL_DUPLICATES = ["original/*", "consolidated*", "onnx/*"]

HUB_ID = re.compile(r"(?!.*(--|\.\.))([a-zA-Z0-9][\w.-]{0,95}/)?[a-zA-Z0-9][\w.-]{0,95}(?<![.-])", re.ASCII)

FILE_ENDINGS = {".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".csv", ".txt", ".gz", ".safetensors", ".yaml", ".yml"}


def resolve_folder(path_or_id: str, revision: str | None, repo_type: Literal["model", "dataset"], error: type[UserError]) -> Path:
    """The folder behind a path or a hub id; raises `error` when there is none.

    A hub id is resolved at `revision` (a commit, tag or branch; the default branch otherwise) into the local hub cache.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        refuse_revision(path_or_id, revision, error)
        return path
    if path.exists():
        raise error(f"'{path_or_id}' is a file; a {repo_type} is expected to be a folder or a hub id such as 'org/name'.")
    if looks_like_path(path_or_id):
        raise error(f"'{path_or_id}' does not exist.{nearest_sibling(path)} Relative paths start at the working directory.")
    if not HUB_ID.fullmatch(path_or_id):
        raise error(f"'{path_or_id}' is neither a folder here nor written like a hub id ('org/name').{nearest_sibling(path)}")
    return _from_hub(path_or_id, revision, repo_type, error)


def refuse_revision(path: str, revision: str | None, error: type[UserError]) -> None:
    """Only the hub keeps revisions: one that is given for something local would silently mean nothing."""
    if revision is not None:
        raise error(f"'{path}' is on this machine, so revision '{revision}' means nothing. Remove `revision`, or give a hub id.")


def looks_like_path(text: str) -> bool:
    """Whether it can only be meant as a path: absolute, relative with a dot, several folders deep, or with a file's ending."""
    return text.startswith(("/", "./", "../", "~")) or "\\" in text or text.count("/") > 1 or Path(text).suffix.lower() in FILE_ENDINGS


def nearest_sibling(path: Path) -> str:
    """` Did you mean '<existing neighbour>'?`, or which folder on the way is the first that does not exist."""
    parent = path.parent
    if parent.is_dir():
        close = difflib.get_close_matches(path.name, [entry.name for entry in parent.iterdir()], n=1, cutoff=0.5)
        return f" Did you mean '{parent / close[0]}'?" if close else ""
    missing = parent
    while not missing.parent.is_dir():
        missing = missing.parent
    return f" There is no folder '{missing}'."


def _from_hub(repo_id: str, revision: str | None, repo_type: Literal["model", "dataset"], error: type[UserError]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted = f"{repo_type} '{repo_id}'" + (f" at revision '{revision}'" if revision else "")
    commit, trouble = _ask_for_commit(repo_id, revision, repo_type)
    try:
        folder = snapshot_download(
            repo_id,
            repo_type=repo_type,
            revision=commit or revision,
            local_files_only=commit is None,
            allow_patterns=MODEL_FILES if repo_type == "model" else None,
            ignore_patterns=MODEL_DUPLICATES if repo_type == "model" else None,
        )
    except LocalEntryNotFoundError as absent:
        hint = nearest_sibling(Path(repo_id)) if Path(repo_id).parent.is_dir() else ""
        presence = "only partly in" if hasattr(absent, "snapshot_path") else "not in"  # an interrupted download left something
        raise error(
            f"'{repo_id}' is not a folder here, {wanted} is {presence} the local hub cache, and {trouble or 'the hub stopped answering'}."
            f"{hint} Check the spelling, or download it on a machine with access and give its folder."
        ) from absent
    except Exception as failure:
        raise error(f"{wanted} could not be downloaded from the hub: {type(failure).__name__}: {_first_line(failure)}") from failure
    return Path(folder)


def _ask_for_commit(repo_id: str, revision: str | None, repo_type: str) -> tuple[str | None, str]:
    """(commit, "") from the hub, or (None, why not). Never takes longer than `ANSWER_WITHIN_S`.

    The question runs in a thread because the look-up of a host name has no timeout of its own.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError, RevisionNotFoundError

    answer: list[str] = []
    trouble = [f"the hub did not answer within {ANSWER_WITHIN_S:g} s"]

    def ask() -> None:
        try:
            info = HfApi().repo_info(repo_id, revision=revision, repo_type=repo_type, timeout=ANSWER_WITHIN_S)
            answer.append(str(info.sha))
        except OfflineModeIsEnabled:
            trouble[0] = "HF_HUB_OFFLINE forbids asking the hub"
        except RevisionNotFoundError:
            trouble[0] = f"the hub has no revision '{revision}' of it"
        except GatedRepoError:
            trouble[0] = "the hub gives it only to accounts that accepted its terms (see `hf auth login`)"
        except RepositoryNotFoundError:
            trouble[0] = f"the hub has no {repo_type} of that name, or a private one (see `hf auth login`)"
        except Exception as failure:
            trouble[0] = f"the hub cannot be reached ({_first_line(failure)})"

    asking = threading.Thread(target=ask, name="hub", daemon=True)
    asking.start()
    asking.join(ANSWER_WITHIN_S)
    return (answer[0], "") if answer else (None, trouble[0])


def _first_line(failure: Exception) -> str:
    return next(iter(str(failure).strip().splitlines()), type(failure).__name__)
