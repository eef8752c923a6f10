"""Folders by path or hub id, without a network: the local hub cache answers, or the error says what was tried."""

import json
import socket
import time
from types import SimpleNamespace

import huggingface_hub
import huggingface_hub.constants
import pytest

from drumroll.errors import DataError, ModelError
from drumroll.hub import resolve_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """A hub cache as `snapshot_download` leaves it, holding a model and a dataset, and no network."""
    cache = tmp_path / "hub"
    for repo in ("models--org--tiny", "models--solo", "datasets--org--sums"):
        snapshot = cache / repo / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        for ref in ("main", "v1.0"):
            (cache / repo / "refs").mkdir(exist_ok=True)
            (cache / repo / "refs" / ref).write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return cache


@pytest.fixture
def no_network(monkeypatch):
    """The hub is allowed, but no host name can be looked up."""

    def refuse(*_args, **_kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_an_existing_folder_is_used_as_it_is(tmp_path):
    assert resolve_folder(str(tmp_path), None, "model", ModelError) == tmp_path


def test_a_revision_of_a_folder_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"revision 'main' means nothing"):
        resolve_folder(str(tmp_path), "main", "model", ModelError)


@pytest.mark.parametrize("revision", [None, "main", "v1.0", COMMIT])
@pytest.mark.parametrize(("repo_type", "repo_id"), [("model", "org/tiny"), ("model", "solo"), ("dataset", "org/sums")])
def test_offline_cache_answers_for_every_kind_of_revision(hub_cache, repo_type, repo_id, revision):
    folder = resolve_folder(repo_id, revision, repo_type, DataError)
    assert folder.name == COMMIT
    assert (folder / "config.json").exists()


def test_the_cache_answers_when_the_network_is_down(hub_cache, no_network):
    assert resolve_folder("org/tiny", None, "model", ModelError).name == COMMIT


def test_an_unknown_id_says_everything_that_was_tried(hub_cache):
    with pytest.raises(ModelError, match=r"not a folder here.*'org/tinny'.*not in the local hub cache.*HF_HUB_OFFLINE"):
        resolve_folder("org/tinny", None, "model", ModelError)


def test_an_unknown_revision_is_named(hub_cache):
    with pytest.raises(ModelError, match=r"at revision 'v2.0' is not in the local hub cache"):
        resolve_folder("org/tiny", "v2.0", "model", ModelError)


def test_models_and_datasets_are_not_mixed_up(hub_cache):
    with pytest.raises(DataError, match="not in the local hub cache"):
        resolve_folder("org/tiny", None, "dataset", DataError)


def test_an_unreachable_hub_fails_quickly(hub_cache, no_network):
    started = time.monotonic()
    with pytest.raises(ModelError, match="the hub cannot be reached"):
        resolve_folder("org/other", None, "model", ModelError)
    assert time.monotonic() - started < 5


def test_a_hub_that_never_answers_is_given_up(hub_cache, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("drumroll.hub.ANSWER_WITHIN_S", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: time.sleep(3) or [])
    started = time.monotonic()
    with pytest.raises(ModelError, match=r"did not answer within 0.2 s"):
        resolve_folder("org/other", None, "model", ModelError)
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("path", ["./org/tiny", "data/train.jsonl", "a/b/c", "~/nothing-of-that-name", "rows.parquet"])
def test_what_looks_like_a_path_is_never_asked_of_the_hub(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("drumroll.hub._from_hub", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(DataError, match="does not exist"):
        resolve_folder(path, None, "dataset", DataError)


def test_the_nearest_neighbour_is_suggested(tmp_path):
    (tmp_path / "tiny-model").mkdir()
    with pytest.raises(ModelError, match=r"Did you mean '.*tiny-model'\?"):
        resolve_folder(str(tmp_path / "tiny_model"), None, "model", ModelError)


def test_a_missing_folder_on_the_way_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"There is no folder '.*/absent'"):
        resolve_folder(str(tmp_path / "absent" / "deeper" / "model"), None, "model", ModelError)


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "model").write_text("")
    with pytest.raises(ModelError, match="is a file"):
        resolve_folder(str(tmp_path / "model"), None, "model", ModelError)


@pytest.mark.parametrize("text", ["two words", "-dash", "org/na me", "a--b"])
def test_what_is_not_written_like_an_id_is_refused_at_once(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="nor written like a hub id"):
        resolve_folder(text, None, "model", ModelError)


def test_an_interrupted_download_is_not_taken_for_the_whole(hub_cache):
    trees = hub_cache / "models--org--tiny" / "trees"
    trees.mkdir()
    files = {name: {"size": 2, "blob_id": "x"} for name in ("config.json", "model.safetensors")}
    (trees / f"{COMMIT}.json").write_text(json.dumps({"format_version": 1, "files": files}))
    with pytest.raises(ModelError, match="only partly in the local hub cache"):
        resolve_folder("org/tiny", None, "model", ModelError)


def test_a_branch_is_pinned_to_its_commit_before_the_download(hub_cache, monkeypatch):
    asked = {}

    def download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(hub_cache)

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_args, **_kwargs: SimpleNamespace(sha=COMMIT))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_folder("org/tiny", "main", "model", ModelError) == hub_cache
    assert (asked["repo_id"], asked["revision"], asked["local_files_only"]) == ("org/tiny", COMMIT, False)
    assert "*.bin" not in asked["allow_patterns"]
