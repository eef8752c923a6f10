"""Rewards and their verdicts: what is no reward never becomes one."""

import asyncio
import threading
import time

import numpy as np
import pytest

from drumroll.config.models import RewardConfig
from drumroll.errors import PluginError, RewardError, WorkerLost
from drumroll.registry import REGISTRY
from drumroll.rewards.compose import RewardSet
from drumroll.rewards.contains_word import contains_word
from drumroll.rewards.exact_match import exact_match
from drumroll.types import Sampling, Task, Trajectory, Turn


def trajectory(reply="42", **data):
    return Trajectory(
        sample_id="train/1/t/0",
        group_id="train/1/t",
        task=Task("t-7", prompt="6*7=", data={"answer": "42", **data}),
        turns=(Turn("environment", 0, 1, "6*7="), Turn("policy", 1, 2, reply)),
        token_ids=np.array([1, 2], np.int32),
        loss_mask=np.array([False, True]),
        logp=np.zeros(2, np.float32),
        token_version=np.zeros(2, np.int32),
        sampling=Sampling(),
        seed=0,
        reward=None,
        stop_reason="stop",
    )


def config(kind, **options):
    return REGISTRY.lookup("reward", kind).schema(RewardConfig)(kind=kind, **options)


@pytest.fixture
def reward():
    """Makes the config of a reward from a function, as `drumroll.train(reward=function)` does."""
    shipped = []

    def make(function, **options):
        REGISTRY.shipped[function.__name__] = function
        shipped.append(function.__name__)
        return config(f"python:{function.__name__}", **options)

    yield make
    for name in shipped:
        REGISTRY.shipped.pop(name, None)


def score(configs, subject=None, **options):
    return asyncio.run(RewardSet(configs, **options).score(subject or trajectory()))


def returning(value):
    def constant(_trajectory):
        return value

    return constant


@pytest.mark.parametrize(
    ("reply", "answer", "strip", "expected"),
    [("42", "42", True, 1.0), (" 42\n", "42", True, 1.0), (" 42", "42", False, 0.0), ("42", 42, True, 1.0), ("4", "42", True, 0.0)],
)
def test_exact_match(reply, answer, strip, expected):
    assert exact_match(trajectory(reply, answer=answer), strip=strip) == expected


@pytest.mark.parametrize(
    ("reply", "word", "expected"),
    [
        ("The Dog barked.", "dog", 1.0),
        ("dog", "dog", 1.0),
        ("dogs and hotdog", "dog", 0.0),
        ("I like C++, you?", "c++", 1.0),
        ("a.b", "a b", 0.0),
        ("", "dog", 0.0),
    ],
)
def test_contains_word(reply, word, expected):
    assert contains_word(trajectory(reply), word=word) == expected


def test_weights_parts_and_options():
    verdict = score([config("exact_match", weight=2.0), config("contains_word", word="43", weight=5.0)])
    assert verdict.reward == 2.0
    assert verdict.parts == {"exact_match": 1.0, "contains_word": 0.0}
    assert verdict.success is None


def test_no_rewards_no_verdict(reward):
    assert score([]).reward is None
    verdict = score([reward(returning(None), success_at=1.0)])
    assert (verdict.reward, verdict.parts, verdict.success) == (None, {}, None)


def test_a_reward_that_does_not_apply_leaves_the_others_alone(reward):
    verdict = score([reward(returning(None), success_at=0.5), config("exact_match", success_at=1.0)])
    assert (verdict.reward, verdict.success) == (1.0, True)


@pytest.mark.parametrize(("thresholds", "success"), [((1.0, None), True), ((1.0, 1.0), False), ((None, 0.0), True), ((None, None), None)])
def test_success_needs_every_threshold(thresholds, success):
    first, second = thresholds
    configs = [config("exact_match", success_at=first, weight=-3.0), config("contains_word", word="no", success_at=second)]
    assert score(configs).success is success


def test_the_same_reward_twice_has_two_names():
    rewards = RewardSet([config("contains_word", word=word) for word in ("42", "43", "44")])
    assert rewards.names == ["contains_word", "contains_word_2", "contains_word_3"]
    assert asyncio.run(rewards.score(trajectory())).parts == {"contains_word": 1.0, "contains_word_2": 0.0, "contains_word_3": 0.0}


def test_mappings_are_summed_and_named(reward):
    verdict = score([reward(returning({"format": 0.25, "length": True, "style": None}), weight=2.0, success_at=1.25)])
    assert verdict.parts == {"constant/format": 0.25, "constant/length": 1.0}
    assert (verdict.reward, verdict.success) == (2.5, True)


def test_rewards_by_file_have_their_functions_name(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def half(trajectory, *, share: float = 0.5):\n    return share\n")
    assert score([config(f"{path}:half", share=0.25)]).parts == {"half": 0.25}


def test_classes_and_coroutines_are_rewards_too(reward):
    class Counting:
        class Config(RewardConfig):
            step: float = 1.0

        def __init__(self, config):
            self.config, self.calls = config, 0

        async def __call__(self, subject):
            await asyncio.sleep(0)
            self.calls += 1
            return self.calls * self.config.step

    async def later(subject, *, amount: float = 3.0):
        await asyncio.sleep(0)
        return amount

    rewards = RewardSet([reward(Counting, step=0.5), reward(later)])
    assert [asyncio.run(rewards.score(trajectory())).parts["Counting"] for _ in range(2)] == [0.5, 1.0]
    assert asyncio.run(rewards.score(trajectory())).parts["later"] == 3.0


@pytest.mark.parametrize("value", [1, True, np.float32(0.5), np.int64(2), np.bool_(True), -1e6])
def test_numbers_of_every_kind_are_taken(reward, value):
    got = score([reward(returning(value))]).reward
    assert got == float(value)
    assert type(got) is float


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e7, "1.0", [1.0], np.array([1.0, 2.0]), 1j, {"a": "1"}])
def test_what_is_no_reward_is_an_error_with_its_name_and_value(reward, value):
    with pytest.raises(RewardError, match=r"reward 'constant(/a)?' on task 't-7' returned .*was expected"):
        score([config("exact_match"), reward(returning(value))])


def test_an_exception_is_wrapped_once_with_its_place(reward):
    with pytest.raises(
        RewardError, match=r"reward 'exact_match' failed on task 't-7': KeyError: 'solution' \(.*exact_match.py, line \d+\)"
    ):
        score([config("exact_match", field="solution")])


def test_a_slow_reward_runs_into_its_deadline_and_holds_up_nobody(reward):
    release = threading.Event()

    def stuck(_trajectory):
        release.wait(20)
        return 1.0

    async def sleepy(_trajectory):
        await asyncio.sleep(20)

    async def both():
        slow = asyncio.create_task(RewardSet([reward(stuck)], deadline_s=0.2).score(trajectory()))
        quick = await RewardSet([config("exact_match")]).score(trajectory())
        try:
            with pytest.raises(RewardError, match=r"reward 'stuck' on task 't-7' took longer than 0.2 s"):
                await slow
        finally:
            release.set()
        return quick

    assert asyncio.run(both()).reward == 1.0
    with pytest.raises(RewardError, match=r"took longer than 0\.1 s"):
        score([reward(sleepy)], deadline_s=0.1)


def test_a_timeout_inside_a_reward_is_its_own_failure(reward):
    def times_out(_trajectory):
        raise TimeoutError("judge did not answer")

    with pytest.raises(RewardError, match=r"failed on task 't-7': TimeoutError: judge did not answer"):
        score([reward(times_out)])


def test_five_hundred_verdicts_cost_little():
    subjects = [trajectory(str(i)) for i in range(500)]

    async def all_of_them():
        rewards = RewardSet([config("exact_match")])
        return await asyncio.gather(*map(rewards.score, subjects))

    def cpu_s():
        started = time.process_time()
        verdicts = asyncio.run(all_of_them())
        assert sum(verdict.reward for verdict in verdicts) == 1.0
        return time.process_time() - started

    assert min(cpu_s() for _ in range(3)) < 0.15  # about 0.03 on an idle core


def test_unknown_rewards_are_named():
    with pytest.raises(PluginError, match=r"no reward named 'exact_mach'. Did you mean 'exact_match'\?"):
        RewardSet([RewardConfig(kind="exact_mach")])


def test_a_reward_that_fails_is_asked_again_and_its_failures_are_counted(reward):
    times = []

    def shaky(_trajectory):
        times.append(1)
        if len(times) % 3:
            raise OSError("not now")
        return 0.5

    verdict = score([reward(shaky, retries=2), config("exact_match")])
    assert (verdict.parts, verdict.failures) == ({"shaky": 0.5, "exact_match": 1.0}, {"shaky": 2})
    assert set(verdict.seconds) == {"shaky", "exact_match"}
    with pytest.raises(RewardError, match="not now"):
        score([reward(shaky, retries=1)])
    assert len(times) == 5


def test_a_rewards_own_deadline_goes_before_the_runs(reward):
    async def sleepy(_trajectory):
        await asyncio.sleep(20)

    with pytest.raises(RewardError, match=r"took longer than 0\.05 s"):
        score([reward(sleepy, deadline_s=0.05, retries=0)], deadline_s=60.0)


def test_pooled_rewards_are_asked_elsewhere_and_somebody_else_each_time():
    class Pool:
        def __init__(self):
            self.questions = []

        async def ask(self, domain, number, subject, asked):
            self.questions.append((domain, number, subject.task.id, tuple(asked)))
            asked.append(len(asked))
            if len(asked) < 2:
                raise WorkerLost("gone")
            return {"exact_match_2": 0.25}

    pool = Pool()
    rewards = RewardSet([config("exact_match"), config("exact_match", pooled=True, weight=2.0)], domain="math", pool=pool)
    verdict = asyncio.run(rewards.score(trajectory()))
    assert (verdict.reward, verdict.parts) == (1.5, {"exact_match": 1.0, "exact_match_2": 0.25})
    assert pool.questions == [("math", 1, "t-7", ()), ("math", 1, "t-7", (0,))]
    assert verdict.failures == {"exact_match_2": 1}


def test_as_many_samples_as_a_reward_says_are_before_it_and_its_deadline_begins_with_its_turn(reward):
    open_, most = [], []

    class Narrow:
        concurrency = 2

        class Config(RewardConfig):
            pass

        def __init__(self, config):
            pass

        async def __call__(self, subject):
            open_.append(subject)
            most.append(len(open_))
            await asyncio.sleep(0.1)
            open_.pop()
            return 1.0

    async def all_of_them():
        rewards = RewardSet([reward(Narrow, deadline_s=0.25, retries=0)])
        return await asyncio.gather(*(rewards.score(trajectory()) for _ in range(8)))

    assert [verdict.reward for verdict in asyncio.run(all_of_them())] == [1.0] * 8
    assert max(most) == 2


def test_a_thread_that_hangs_does_not_take_the_others_with_it(reward):
    release = threading.Event()

    def stuck(subject):
        if subject.last_reply == "hang":
            release.wait(20)
        return 1.0

    async def run():
        rewards = RewardSet([reward(stuck, retries=0)], deadline_s=0.2)
        hung = await asyncio.gather(*(rewards.score(trajectory("hang")) for _ in range(20)), return_exceptions=True)
        return hung, await rewards.score(trajectory())

    try:
        hung, after = asyncio.run(run())
    finally:
        release.set()
    assert all(isinstance(error, RewardError) for error in hung)
    assert after.reward == 1.0
