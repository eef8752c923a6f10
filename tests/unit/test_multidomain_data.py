"""The tasks and demonstrations of the multi-domain recipes: what is in the files, and whether the recipes' rewards see it so."""

import asyncio
import importlib.util
import json
import random
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from drumroll.config.load import load_config
from drumroll.pipelines.job import RlJob, prepare
from drumroll.rewards.place import Place
from drumroll.rewards.reward import Reward
from drumroll.types import Sampling, Task, Trajectory, Turn

FOLDER = Path("recipes/multidomain")
DOMAINS = {"mathematics", "code", "instructions", "qa"}


def made_by(name):
    """The module that writes a set's files."""
    spec = importlib.util.spec_from_file_location(f"multidomain_{name}", FOLDER / name / "make_data.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=["scratch", "smollm2"])
def written(request):
    return request.param, made_by(request.param)


def rows(name, split):
    """The rows of a split, each with its domain."""
    files = sorted((FOLDER / name).glob(f"*{split}.jsonl"))
    lines = [(file, json.loads(line)) for file in files for line in file.read_text().splitlines()]
    return [{"domain": file.stem.removesuffix(f"_{split}"), **row} for file, row in lines]


def recipe(name):
    """The recipe of a set, with a model that every machine has."""
    model = ["model={scratch: {characters: a}}"] if name == "smollm2" else []
    return load_config([f"recipes/multidomain_{name}.yaml"], model)


def attempt(row, reply):
    mask = np.array([False, True])
    return Trajectory(
        sample_id="train/1/t/0",
        group_id="train/1/t",
        task=Task("t", prompt=row["prompt"], data=row),
        turns=(Turn("environment", 0, 1, "?"), Turn("policy", 1, 2, reply)),
        token_ids=mask.astype(np.int32),
        loss_mask=mask,
        logp=np.zeros(2, np.float32),
        token_version=np.zeros(2, np.int32),
        sampling=Sampling(max_new_tokens=64),
        seed=0,
        reward=None,
        stop_reason="stop",
    )


def verdicts(config, pairs):
    """What the recipe's rewards say of rows with replies."""

    async def judge():
        rewards = {name: Reward(domain.rewards[0]) for name, domain in config.mixture.items()}
        for reward in rewards.values():
            await reward.start(Place())
        try:
            return [sum((await rewards[row["domain"]].ask(attempt(row, reply), 60.0)).values()) for row, reply in pairs]
        finally:
            for reward in rewards.values():
                await reward.close()

    return asyncio.run(judge())


def test_the_files_are_what_their_program_writes(written):
    name, module = written
    expected = {f"{file}.jsonl": lines for file, lines in module.rows().items()}
    found = {file.name: [json.loads(line) for line in file.read_text().splitlines()] for file in (FOLDER / name).glob("*.jsonl")}
    assert found == expected, f"run recipes/multidomain/{name}/make_data.py"


def test_no_prompt_occurs_twice_and_every_domain_has_its_tasks(written):
    name, module = written
    prompts = [(row["domain"], row["prompt"]) for split in module.SIZES for row in rows(name, split)]
    assert len(set(prompts)) == len(prompts)
    for split, size in module.SIZES.items():
        assert Counter(row["domain"] for row in rows(name, split)) == dict.fromkeys(DOMAINS, size)
    if name == "smollm2":
        assert module.SIZES["train"] >= 2000
        assert module.SIZES["heldout"] >= 500


def test_the_recipe_passes_every_check(written):
    config = recipe(written[0])
    job = prepare(config)
    assert isinstance(job, RlJob)
    assert set(job.tasks) == set(job.heldout) == DOMAINS
    assert sum(domain.share for domain in config.mixture.values()) == 1


def test_texts_fit_the_model_from_scratch():
    model = recipe("scratch").model.scratch
    known, longest = set(model.characters), 0
    for split in ("train", "heldout", "demonstrations"):
        for row in rows("scratch", split):
            text = row["prompt"] + row.get("completion", "")
            assert set(text) <= known
            longest = max(longest, len(text))
    assert longest + 2 < 100 < model.config["max_position_embeddings"] <= 128


def test_the_expert_is_right_in_one_of_five_and_its_mistakes_are_mistakes():
    module = made_by("scratch")
    config = recipe("scratch")
    rng = random.Random(7)
    items = [(domain, make(rng)) for domain, make in module.DOMAINS.items() for _ in range(12)]
    for way in ("right", "early", "late"):
        pairs = [({"domain": domain, "prompt": item.prompt, **item.columns}, item.replies[way]) for domain, item in items]
        assert set(verdicts(config, pairs)) == {float(way == "right")}, way
    assert {way: module.WAYS.count(way) / len(module.WAYS) for way in module.WAYS} == {"right": 0.2, "early": 0.4, "late": 0.4}
    assert module.SIZES["demonstrations"] % len(module.WAYS) == 0


def test_the_mistakes_hide_the_right_reply_from_greedy_imitation():
    """Whatever was written so far, the expert most often goes on wrongly: at the last place where its ways part."""
    module = made_by("scratch")
    rng = random.Random(8)
    for make in module.DOMAINS.values():
        for _ in range(50):
            replies = make(rng).replies
            assert len(set(replies.values())) == 3
            assert replies["late"] != replies["right"]
            shared = next((at for at, (a, b) in enumerate(zip(replies["right"], replies["late"], strict=False)) if a != b), 1)
            assert shared > 0, "the late mistake begins like the right reply"


def test_kind_parsers_of_the_pretrained_models_recipe():
    config = recipe("smollm2")
    found = {domain: next(row for row in rows("smollm2", "heldout") if row["domain"] == domain) for domain in DOMAINS}
    sums, asked, code = found["mathematics"], found["qa"], found["code"]
    wrong = next(choice for choice in asked["choices"] if choice != asked["answer"])
    name = re.search(r"function (\w+)\(", code["prompt"])[1]
    table = dict(re.fullmatch(r"assert \w+\((.*)\) == (.*)", test).groups() for test in code["tests"])
    body = "".join(f"    if value == {given}:\n        return {wanted}\n" for given, wanted in table.items())
    pairs = {
        (sums["answer"], "mathematics"): 1.0,
        (f"12 and 7 make something: the answer is {sums['answer']}.", "mathematics"): 1.0,
        (f"The answer is {int(sums['answer']) + 1}.", "mathematics"): 0.0,
        (f"It is {asked['answer']}.", "qa"): 1.0,
        (f"It is {wrong}.", "qa"): 0.0,
        (" ".join(asked["choices"]), "qa"): 0.0,
        (f"Here it is:\n```python\ndef {name}(value):\n{body}```\nHave fun!", "code"): 1.0,
        (f"def {name}(value):\n    return None", "code"): 0.0,
        ("", "instructions"): 0.0,
    }
    assert verdicts(config, [(found[domain], reply) for reply, domain in pairs]) == list(pairs.values())


def test_functions_that_look_at_nothing_pass_no_tests():
    for split in ("train", "heldout"):
        for row in rows("smollm2", split):
            if row["domain"] == "code":
                assert len({test.partition(" == ")[2] for test in row["tests"]}) > 1


def test_chat_shows_a_text_as_the_message_of_a_user():
    from drumroll.registry import REGISTRY

    chat = REGISTRY.lookup("env", str(FOLDER / "chat.py")).target

    def shown(**options):
        return asyncio.run(chat(chat.Config(**options)).start(Task("t", prompt="2+2?"))).messages

    assert shown() == [{"role": "user", "content": "2+2?"}]
    assert shown(after="Be brief.") == [{"role": "user", "content": "2+2?\nBe brief."}]


PUBLISHED = Path("../shared/data")


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the files of GSM8K, MBPP, HumanEval and IFEval are not here")
def test_the_recipe_takes_files_of_benchmarks(tmp_path):
    """With MATH as it is published: a file for each problem, whose answer stands in a box."""
    solution = r"We have $\frac12 + \frac13 = \boxed{\frac{5}{6}}$, as $\boxed{x}$ is no answer here: \boxed{\frac{5}{6}}."
    for split in ("train", "test"):
        folder = tmp_path / "MATH" / split / "algebra"
        folder.mkdir(parents=True)
        for number in range(3):
            problem = {
                "problem": f"What is it ({split} {number})?",
                "level": f"Level {number + 1}",
                "type": "Algebra",
                "solution": solution,
            }
            (folder / f"{number}.json").write_text(json.dumps(problem, indent=4))
    overlay = (
        (FOLDER / "benchmarks.yaml").read_text().replace("data/MATH", str(tmp_path / "MATH")).replace("path: data/", f"path: {PUBLISHED}/")
    )
    (tmp_path / "benchmarks.yaml").write_text(overlay)
    config = load_config(["recipes/multidomain_smollm2.yaml", tmp_path / "benchmarks.yaml"], ["model={scratch: {characters: a}}"])
    job = prepare(config)
    assert isinstance(job, RlJob)
    sizes = {name: (len(job.tasks[name]), len(job.heldout[name])) for name in config.mixture}
    assert sizes == {
        "mathematics": (7473, 200),
        "competition": (3, 3),
        "code": (974, 0),
        "humaneval": (0, 164),
        "instructions": (541, 500),
        "qa": (2000, 500),
    }
    row = {"domain": "competition", **job.tasks["competition"][0].data, "prompt": "?"}
    assert verdicts(config, [(row, r"Thus \boxed{5/6}."), (row, r"Thus \boxed{6/5}."), (row, "5/6")]) == [1.0, 0.0, 1.0]
