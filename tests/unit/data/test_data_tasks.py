"""Tasks and demonstrations from every kind of source, and what is said when one is not as it should be."""

import datetime
import json

import huggingface_hub.constants
import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from drumroll.config.models import ANY, SourceConfig
from drumroll.data.tasks import Needs, load_demonstrations, load_tasks
from drumroll.errors import DataError
from drumroll.types import Exchange

ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "level": i} for i in range(5)]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_json(path, rows):
    path.write_text(json.dumps(rows))
    return path


def load(path, **options):
    return load_tasks(SourceConfig(path=str(path), **options), split_label="train")


@pytest.fixture(scope="module")
def saved_dataset(tmp_path_factory):
    """Folders that `save_to_disk` writes: one dataset, and one with splits."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("saved")
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(folder / "single")
    datasets.DatasetDict({"train": rows, "test": rows.select(range(2))}).save_to_disk(folder / "splits")
    datasets.enable_progress_bars()
    return folder


@pytest.mark.parametrize(("name", "write"), [("t.jsonl", write_jsonl), ("t.json", write_json), ("t.parquet", write_parquet)])
def test_files_load_alike(tmp_path, name, write):
    tasks = load(write(tmp_path / name, ROWS))
    assert [task.id for task in tasks] == [f"train-{i}" for i in range(5)]
    assert [task.prompt for task in tasks] == [row["prompt"] for row in ROWS]
    assert [dict(task.data) for task in tasks] == ROWS
    assert {task.domain for task in tasks} == {"default"}


@pytest.mark.parametrize(("folder", "split", "count"), [("single", None, 5), ("splits", "test", 2)])
def test_save_to_disk_folders_load(saved_dataset, folder, split, count):
    before = sorted(saved_dataset.rglob("*"))
    tasks = load(saved_dataset / folder, split=split)
    assert [dict(task.data) for task in tasks] == ROWS[:count]
    assert sorted(saved_dataset.rglob("*")) == before, "loading must leave the user's folder as it was"


@pytest.mark.parametrize(("write", "ending"), [(write_jsonl, "jsonl"), (write_parquet, "parquet")])
def test_folders_of_files_with_splits_load(tmp_path, write, ending):
    write(tmp_path / "set" / f"train.{ending}", ROWS)
    write(tmp_path / "set" / f"test.{ending}", ROWS[:2])
    assert [dict(task.data) for task in load(tmp_path / "set", split="test")] == ROWS[:2]
    assert sorted(entry.name for entry in (tmp_path / "set").rglob("*")) == [f"test.{ending}", f"train.{ending}"]
    with pytest.raises(DataError, match=r"several splits \(.*\): say which"):
        load(tmp_path / "set")
    with pytest.raises(DataError, match=r"no split 'tset'. Did you mean 'test'\?"):
        load(tmp_path / "set", split="tset")


def test_a_hub_dataset_loads_from_the_offline_cache(tmp_path, monkeypatch):
    repo = tmp_path / "datasets--org--sums"
    write_parquet(repo / "snapshots" / "c0ffee" / "data" / "train-00000-of-00001.parquet", ROWS)
    (repo / "refs").mkdir()
    (repo / "refs" / "v1").write_text("c0ffee")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert [dict(task.data) for task in load("org/sums", revision="v1")] == ROWS
    with pytest.raises(DataError, match="'org/sumz' is not in the local hub cache"):
        load("org/sumz")


@pytest.mark.parametrize(("name", "write"), [("t.jsonl", write_jsonl), ("t.parquet", write_parquet)])
def test_messages_become_messages_without_the_keys_that_parquet_adds(tmp_path, name, write):
    rows = [{"prompt": CHAT}, {"prompt": [{"role": "user", "content": "?", "name": "Ada"}]}]
    first, second = load(write(tmp_path / name, rows))
    assert first.prompt is None
    assert first.messages == tuple(CHAT)
    assert second.messages == ({"role": "user", "content": "?", "name": "Ada"},)


def test_ids_domains_prompt_columns_and_limits(tmp_path):
    rows = [{"q": "a", "key": 7, "domain": "math"}, {"q": "b", "key": "x"}, {"q": "c", "key": "y"}]
    tasks = load(write_jsonl(tmp_path / "t.jsonl", rows), prompt_field="q", id_field="key", domain="chat", limit=2)
    assert [(task.id, task.prompt, task.domain) for task in tasks] == [("7", "a", "math"), ("x", "b", "chat")]


def test_a_limit_reads_no_further(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "a"}\n{broken')
    assert len(load(path, limit=1)) == 1


def test_blank_lines_are_skipped_and_lines_counted(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('\ufeff{"prompt": "a"}\n\n  \n{"prompt": "b"}\n', encoding="utf-8")
    assert [task.id for task in load(path)] == ["train-0", "train-1"]
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"\n')
    with pytest.raises(DataError, match="line 3: not JSON"):
        load(path)


def test_values_that_json_cannot_hold_are_converted(tmp_path):
    row = {"prompt": "p", "when": datetime.date(2024, 5, 17), "raw": b"\x00\xff", "nested": [{"at": datetime.datetime(2024, 1, 2, 3)}]}
    (task,) = load(write_parquet(tmp_path / "t.parquet", [row]))
    assert json.loads(json.dumps(task.data)) == {
        "prompt": "p",
        "when": "2024-05-17",
        "raw": "AP8=",
        "nested": [{"at": "2024-01-02T03:00:00"}],
    }


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            [{"promt": "a", "answer": "b"}],
            {},
            r"line 1: there is no column 'prompt'. Did you mean 'promt'\? Columns: promt, answer. Name the right one by `prompt_field`",
        ),
        ([{"prompt": "a"}, {"prompt": None}], {}, r"line 2: column 'prompt' holds None"),
        ([{"prompt": 3}], {}, r"column 'prompt' holds 3; a prompt is text or a list"),
        ([{"prompt": []}], {}, r"column 'prompt' holds \[\]"),
        ([{"prompt": [{"content": "a"}]}], {}, r"message 0 has no `role`"),
        ([{"prompt": [{"role": "user"}]}], {}, r"message 0 has no `content`"),
        ([{"prompt": ["a"]}], {}, r"message 0 is 'a'"),
        ([{"prompt": "a", "id": 1}, {"prompt": "b", "id": 1}], {"id_field": "id"}, r"line 2: id '1' was already used in line 1"),
        ([{"prompt": "a"}], {"id_field": "id"}, r"no column 'id'"),
        ([{"prompt": "a", "id": None}], {"id_field": "id"}, r"column 'id' holds None"),
        ([{"prompt": "a", "domain": 3}], {}, r"column 'domain' holds 3"),
        ([["prompt", "a"]], {}, r"line 1: \[\"prompt\", \"a\"\] is not an object"),
        ([], {}, r"holds no rows"),
        ([{"prompt": "a"}], {"split": "train"}, r"one file, so it has no split 'train'"),
        ([{"prompt": "a"}], {"revision": "v1"}, r"revision 'v1' means nothing"),
    ],
)
def test_bad_rows_are_named(tmp_path, rows, options, message):
    with pytest.raises(DataError, match=message):
        load(write_jsonl(tmp_path / "t.jsonl", rows), **options)


def test_a_needed_column_is_checked_in_every_row(tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", [*ROWS, {"prompt": "x", "anwser": "1"}])
    source = SourceConfig(path=str(path))
    with pytest.raises(DataError, match=r"line 6: there is no column 'answer'. Did you mean 'anwser'\?"):
        load_tasks(source, split_label="train", needs={ANY: Needs({"answer": "`rewards.0.field`"})})


def test_bad_files_are_named(tmp_path, saved_dataset):
    (tmp_path / "t.csv").write_text("prompt\na\n")
    (tmp_path / "t.parquet").write_text("not parquet")
    (tmp_path / "t.json").write_text('{"prompt": "a"}')
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    (tmp_path / "empty").mkdir()
    for name, message in [
        ("t.csv", r"ending in '.csv' cannot be read. Known: .jsonl"),
        ("t.parquet", "not a readable Parquet file"),
        ("t.json", "holds a dict; a list of objects"),
        ("latin.jsonl", "cannot be read"),
        ("empty", "holds no dataset"),
        ("t.jsnl", r"does not exist|nor written like|not in the local hub cache"),
    ]:
        with pytest.raises(DataError, match=message):
            load(tmp_path / name)
    with pytest.raises(DataError, match=r"does not exist. Did you mean '.*latin.jsonl'\?"):
        load(tmp_path / "latn.jsonl")
    with pytest.raises(DataError, match="without splits"):
        load(saved_dataset / "single", split="train")


def test_environments_with_prompts_of_their_own_need_no_prompt_column(tmp_path):
    source = SourceConfig(path=str(write_jsonl(tmp_path / "t.jsonl", [{"seed": 3}])))
    (task,) = load_tasks(source, split_label="train", needs={ANY: Needs(prompt=False)})
    assert (task.prompt, task.messages, task.data["seed"]) == (None, None, 3)
    with pytest.raises(DataError, match="no column 'prompt'"):
        load_tasks(source, split_label="train")


def test_each_domain_has_needs_of_its_own(tmp_path):
    rows = [{"domain": "sums", "prompt": "1+1=", "answer": "2"}, {"domain": "games", "seed": 3}]
    source = SourceConfig(path=str(write_jsonl(tmp_path / "t.jsonl", rows)))
    needs = {"sums": Needs({"answer": "`answer_field`"}), "games": Needs({"seed": "`seed_field`"}, prompt=False)}
    assert [task.domain for task in load_tasks(source, split_label="train", needs=needs)] == ["sums", "games"]
    with pytest.raises(DataError, match=r"line 2: there is no column 'level'.* Name the right one by `level_field`\."):
        load_tasks(source, split_label="train", needs={**needs, "games": Needs({"level": "`level_field`"}, prompt=False)})
    with pytest.raises(DataError, match=r"line 2: its domain is 'games'; sums or game was expected. Did you mean 'game'\?"):
        load_tasks(source, split_label="train", needs={"sums": Needs(), "game": Needs()})


def test_demonstrations(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a=", "reply": "b"}, {"prompt": CHAT, "reply": "4"}])
    plain, chat = load_demonstrations(SourceConfig(path=str(path)), "reply")
    assert plain.exchanges == (Exchange("a=", None, "b"),)
    assert chat.exchanges == (Exchange(None, tuple(CHAT), "4"),)
    with pytest.raises(DataError, match="no column 'completion'"):
        load_demonstrations(SourceConfig(path=str(path)))
    with pytest.raises(DataError, match=r"column 'reply' holds ''; the text of a reply"):
        load_demonstrations(SourceConfig(path=str(write_jsonl(path, [{"prompt": "a", "reply": ""}]))), "reply")


def test_demonstrations_of_several_turns(tmp_path):
    user, more = {"role": "user", "content": "2+2?"}, {"role": "user", "content": "And 3+3?"}
    four, six = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "6"}
    rows = [
        {"turns": [{"prompt": "2+2="}, {"reply": "5", "imitate": False}, {"prompt": "No. "}, {"reply": "4"}]},
        {"messages": [user, four, more, six]},
        {"turns": [{"messages": [user]}, {"reply": "4"}], "token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "tokenizer": "abc"},
    ]
    played, said, exported = load_demonstrations(SourceConfig(path=str(write_jsonl(tmp_path / "d.jsonl", rows))))
    assert played.exchanges == (Exchange("2+2=", None, "5", is_imitated=False), Exchange("No. ", None, "4"))
    assert said.exchanges == (Exchange(None, (user,), "4"), Exchange(None, (more,), "6"))
    assert (exported.tokens, exported.tokenizer) == (((1, 2, 3), (False, True, True)), "abc")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"turns": []}, "column 'turns' holds"),
        ({"turns": [{"prompt": "a"}]}, "in turns were expected"),
        ({"turns": [{"reply": "a"}, {"prompt": "b"}]}, r"entry 0 is .*`prompt` \(text\) or `messages`"),
        ({"turns": [{"prompt": "a"}, {"prompt": "b"}]}, "entry 1 is .*a `reply` was expected"),
        ({"turns": [{"prompt": "a"}, {"reply": 3}]}, "a `reply` was expected"),
        ({"messages": [{"role": "user", "content": "a"}]}, "nothing to imitate"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "one at the beginning"),
    ],
)
def test_what_is_no_episode_is_named(tmp_path, row, message):
    with pytest.raises(DataError, match=f"line 1: .*{message}"):
        load_demonstrations(SourceConfig(path=str(write_jsonl(tmp_path / "d.jsonl", [row]))))


def test_seeds_are_tasks_for_environments_that_make_their_own():
    tasks = load_tasks(
        SourceConfig(seeds="7-9", domain="lake"), split_label="heldout", needs={ANY: Needs({"seed": "`seed_field`"}, prompt=False)}
    )
    assert [(task.id, task.data["seed"], task.prompt, task.domain) for task in tasks] == [
        (f"heldout-{seed}", seed, None, "lake") for seed in (7, 8, 9)
    ]
    assert len(load_tasks(SourceConfig(seeds="0-999", limit=5), split_label="train", needs={ANY: Needs(prompt=False)})) == 5
    with pytest.raises(DataError, match="seed 7: there is no column 'prompt'"):
        load_tasks(SourceConfig(seeds="7-9"), split_label="train")


@pytest.mark.parametrize(
    "options", [{}, {"path": "a.jsonl", "seeds": "0-1"}, {"seeds": "9-7"}, {"seeds": "7"}, {"seeds": "a-b"}, {"seeds": ""}]
)
def test_a_source_is_a_path_or_seeds(options):
    with pytest.raises(ValidationError, match="`seeds`"):
        SourceConfig(**options)
