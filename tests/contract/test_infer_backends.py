"""What every inference backend must do, checked on tiny models on the CPU."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from engine_driver import ARCHITECTURES, EOS, Driver, ask, bucketed, engine, make_model, prompt_of, reference, tensors
from installed import missing

from drumroll.backends.checksum import checksum
from drumroll.backends.sampling import processed_logp
from drumroll.config.models import EngineConfig
from drumroll.errors import DrumrollError, WeightSyncError
from drumroll.registry import REGISTRY
from drumroll.types import Version

BACKENDS = REGISTRY.names("infer_backend")


@pytest.fixture(scope="module", params=BACKENDS)
def kind(request: pytest.FixtureRequest) -> str:
    if why := missing(request.param):
        pytest.skip(why)
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, kind: str) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), kind=kind)


@pytest.fixture(scope="module")
def lasting(folder: Path, kind: str) -> Iterator[Driver | None]:
    """An engine that takes long to start serves one test after another."""
    if kind == "native":
        yield None
        return
    with engine(folder, kind) as running:
        yield running


@pytest.fixture
def driver(folder: Path, kind: str, lasting: Driver | None) -> Iterator[Driver]:
    if lasting is not None:
        lasting.begin_anew()
        yield lasting
        return
    with engine(folder, kind) as running:
        yield running


def own_logp(
    folder: Path, prompt: list[int], reply: list[int], temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> list[float]:
    """Log-probabilities of a reply from one plain forward of the whole text."""
    with torch.no_grad():
        logits = reference(folder)(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
    rows = len(reply)
    logp = processed_logp(logits, torch.full((rows,), temperature), torch.full((rows,), top_p), torch.full((rows,), top_k))
    return logp.gather(-1, torch.tensor(reply)[:, None])[:, 0].tolist()


def greedy(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers' own generation says."""
    asked = torch.tensor([prompt])
    said = reference(folder).generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=num_tokens, do_sample=False)
    reply: list[int] = said[0, len(prompt) :].tolist()
    return reply


def refuse_what_it_refuses(kind: str, folder: Path) -> None:
    entry = REGISTRY.lookup("infer_backend", kind)
    refusal = entry.target.refusal(
        entry.schema(EngineConfig).model_validate({"kind": kind}), json.loads((folder / "config.json").read_text())
    )
    if refusal:
        pytest.skip(refusal)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_is_what_transformers_generates_with_the_first_weights_and_with_later_ones(
    kind: str, architecture: str, tmp_path: Path
) -> None:
    folders = [make_model(tmp_path / str(seed), architecture, seed, kind) for seed in range(2)]
    refuse_what_it_refuses(kind, folders[0])
    prompts = [prompt_of(length) for length in (1, 2, 15, 16, 17, 40, 65, 100)]
    with engine(folders[0], kind) as driver:
        for version, folder in enumerate(folders):
            if version:
                driver.update(version, tensors(folder))
            asked = (ask(f"{version} {i}", prompt, temperature=0.0, max_new_tokens=30) for i, prompt in enumerate(prompts))
            for prompt, reply in zip(prompts, driver.generate(*asked), strict=True):
                assert reply.token_ids == greedy(folder, prompt, 30)
                torch.testing.assert_close(reply.logp, own_logp(folder, prompt, reply.token_ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}, {"top_p": 0.5}])
def test_reported_logp_is_of_the_sampled_distribution(driver: Driver, folder: Path, options: dict[str, float]) -> None:
    prompts = [prompt_of(length, seed=2) for length in (3, 20, 33)]
    replies = driver.generate(*(ask(str(i), prompt, seed=i, max_new_tokens=40, **options) for i, prompt in enumerate(prompts)))
    for prompt, reply in zip(prompts, replies, strict=True):
        torch.testing.assert_close(reply.logp, own_logp(folder, prompt, reply.token_ids, **options), atol=1e-4, rtol=0)


def test_the_seed_decides(driver: Driver) -> None:
    prompt = prompt_of(12)
    one, same, other = driver.generate(ask("one", prompt, 7), ask("same", prompt, 7), ask("other", prompt, 8))
    assert one.token_ids == same.token_ids != other.token_ids


def test_requests_of_different_settings_share_a_batch(driver: Driver) -> None:
    mixed = [ask(f"{i}", prompt_of(10 + i), i, temperature=i % 3 / 2, top_k=i % 4, top_p=1 - i % 5 / 10) for i in range(24)]
    together = driver.generate(*mixed)
    for request, reply in zip(mixed, together, strict=True):
        alone = driver.generate(ask(f"{request.id}-alone", list(request.token_ids), request.seed, **vars_of(request.sampling)))[0]
        assert alone.token_ids == reply.token_ids


def vars_of(sampling: object) -> dict[str, object]:
    return {name: getattr(sampling, name) for name in ("max_new_tokens", "temperature", "top_p", "top_k")}


def test_more_requests_than_slots_each_finish_exactly_once(driver: Driver) -> None:
    names = [f"r{i}" for i in range(50)]
    driver.submit(*(ask(name, prompt_of(1 + 2 * i), i, max_new_tokens=1 + i % 9) for i, name in enumerate(names)))
    driver.gather(names)
    assert driver.poll(0.05) == []
    for i, name in enumerate(names):
        reply = driver.replies[name]
        assert len(reply.finishes) == 1
        assert reply.finishes == (["stop"] if reply.token_ids[-1] == EOS else ["length"])
        assert len(reply.token_ids) <= 1 + i % 9
        assert set(reply.token_version) == {0}
    load = driver.backend.load()
    assert (load.num_running, load.num_waiting) == (0, 0)
    assert load.num_tokens_total - driver.num_tokens_before == sum(len(reply.token_ids) for reply in driver.replies.values())


def test_the_model_ends_replies_itself(driver: Driver) -> None:
    replies = driver.generate(*(ask(f"{i}", prompt_of(5), seed=i, max_new_tokens=200) for i in range(40)))
    ended = [reply for reply in replies if reply.finishes == ["stop"]]
    assert ended
    for reply in ended:
        assert reply.token_ids.index(EOS) == len(reply.token_ids) - 1


def test_stop_tokens_and_stop_strings(driver: Driver) -> None:
    prompt = prompt_of(9)
    free = driver.generate(ask("free", prompt, seed=3, max_new_tokens=60))[0].token_ids
    at = next(i for i in range(4, len(free) - 1) if free[i] not in free[:i])
    by_id, by_text, resumed = driver.generate(
        ask("id", prompt, seed=3, max_new_tokens=60, stop_token_ids=(free[at],)),
        ask("text", prompt, seed=3, max_new_tokens=60, stop=("no such text", text_of(driver, free[at - 2 : at + 1]))),
        ask("resumed", prompt, seed=3, max_new_tokens=60, sampled=free[: at - 1], stop=(text_of(driver, free[at - 2 : at + 1]),)),
    )
    assert by_id.finishes == by_text.finishes == ["stop"]
    assert by_id.token_ids == by_text.token_ids == free[: at + 1]
    if driver.backend.exact_resume:
        assert resumed.finishes == ["stop"]
        assert resumed.token_ids == free[at - 1 : at + 1]


def text_of(driver: Driver, ids: list[int]) -> str:
    from transformers import AutoTokenizer

    return str(AutoTokenizer.from_pretrained(driver.folder).decode(ids))


def test_a_resumed_reply_goes_on_as_if_never_interrupted(driver: Driver) -> None:
    prompt = prompt_of(14)
    whole = driver.generate(ask("whole", prompt, seed=5, max_new_tokens=40))[0]
    cuts = range(len(whole.token_ids))
    rests = driver.generate(*(ask(f"cut {cut}", prompt, seed=5, max_new_tokens=40, sampled=whole.token_ids[:cut]) for cut in cuts))
    for cut, rest in zip(cuts, rests, strict=True):
        if driver.backend.exact_resume:
            assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids
            assert rest.finishes == whole.finishes
        logp = own_logp(driver.folder, prompt, whole.token_ids[:cut] + rest.token_ids)
        torch.testing.assert_close(rest.logp, logp[cut:], atol=1e-4, rtol=0)
    complete = driver.generate(ask("complete", prompt, seed=5, max_new_tokens=40, sampled=whole.token_ids))[0]
    assert (complete.token_ids, complete.finishes) == ([], whole.finishes)


def test_context_is_a_limit(folder: Path, kind: str) -> None:
    with engine(folder, kind, context_tokens=50) as driver:
        replies = driver.generate(*(ask(str(seed), prompt_of(30), seed, max_new_tokens=100, stop_token_ids=()) for seed in range(12)))
    full = [reply for reply in replies if reply.finishes == ["length"]]
    assert full
    assert all(len(reply.token_ids) == 20 for reply in full)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (ask("bad", []), "no prompt"),
        (ask("bad", prompt_of(256)), "context"),
        (ask("bad", prompt_of(200), sampled=prompt_of(56)), "context"),
        (ask("bad", [3, 10**6]), "token 1000000"),
        (ask("bad", [3], sampled=[-1]), "token -1"),
        (ask("bad", [3], temperature=-1.0), "temperature"),
        (ask("bad", [3], top_p=0.0), "top_p"),
        (ask("bad", [3], stop=("",)), "empty stop string"),
    ],
)
def test_a_request_that_can_never_run_says_why(driver: Driver, request_: object, reason: str) -> None:
    bad, good = driver.generate(request_, ask("good", prompt_of(4)))  # type: ignore[arg-type]
    assert (bad.finishes, bad.token_ids) == (["error"], [])
    assert reason in bad.error
    assert good.finishes[0] in ("stop", "length")


def test_a_duplicate_id_is_refused_and_the_first_goes_on(driver: Driver) -> None:
    driver.do(driver.backend.pause())
    driver.submit(ask("twin", prompt_of(4)))
    driver.submit(ask("twin", prompt_of(5)))
    assert [(chunk.finish, "already" in chunk.error) for chunk in driver.poll()] == [("error", True)]
    driver.replies.clear()
    driver.do(driver.backend.resume())
    assert driver.gather(["twin"])[0].finishes[0] in ("stop", "length")


def test_nothing_is_served_before_the_first_update(folder: Path, kind: str) -> None:
    with engine(folder, kind, started=False) as driver:
        assert driver.backend.load().version == Version(0, -1)
        driver.submit(ask("early", prompt_of(4)))
        with pytest.raises(WeightSyncError, match=r"[Uu]pdate"):
            driver.do(driver.backend.resume())
        assert driver.poll(0.05) == []
        driver.update(0)
        assert driver.poll(0.05) == []
        driver.do(driver.backend.resume())
        assert driver.gather(["early"])[0].finishes[0] in ("stop", "length")


def test_pause_keeps_tokens_and_abort_works_while_paused(driver: Driver) -> None:
    undisturbed = driver.generate(ask("undisturbed", prompt_of(6), seed=1, max_new_tokens=150))[0]
    driver.submit(ask("a", prompt_of(6), seed=1, max_new_tokens=150), ask("b", prompt_of(10), temperature=0.0, max_new_tokens=200))
    driver.do(driver.backend.pause())
    driver.poll(0.0)
    before = {name: len(reply.token_ids) for name, reply in driver.replies.items()}
    time.sleep(0.05)
    driver.poll(0.0)
    assert before == {name: len(reply.token_ids) for name, reply in driver.replies.items()}
    driver.backend.abort(["b", "nobody"])
    assert driver.gather(["b"])[0].finishes == ["aborted"]
    driver.do(driver.backend.resume())
    assert driver.gather(["a"])[0].token_ids == undisturbed.token_ids


def test_abort_at_any_time_ends_once_and_spares_the_others(driver: Driver) -> None:
    wanted = [ask(f"w{i}", prompt_of(7 + i), seed=i, max_new_tokens=60) for i in range(6)]
    expected = [reply.token_ids for reply in driver.generate(*wanted)]
    driver.replies.clear()
    for wait_s in (0.0, 0.001, 0.004, 0.01, 0.02):
        doomed = [f"d{i} {wait_s}" for i in range(20)]
        again = [ask(f"{request.id} {wait_s}", list(request.token_ids), request.seed, max_new_tokens=60) for request in wanted]
        driver.submit(*(ask(name, prompt_of(30), max_new_tokens=200, seed=i) for i, name in enumerate(doomed)), *again)
        time.sleep(wait_s)
        driver.backend.abort(doomed)
        for reply in driver.gather(doomed):
            assert len(reply.finishes) == 1
            assert reply.finishes[0] in ("aborted", "stop", "length")
        assert [reply.token_ids for reply in driver.gather(request.id for request in again)] == expected


def test_an_abort_takes_effect_within_a_step(driver: Driver) -> None:
    """Whatever the engine does at that moment: after the step that it is in, the slots are free."""
    for wait_s in (0.0, 0.002, 0.01, 0.02):
        doomed = [f"{i} {wait_s}" for i in range(8)]
        driver.submit(*(ask(name, prompt_of(5), seed=i, max_new_tokens=200) for i, name in enumerate(doomed)))
        driver.poll(wait_s)
        driver.backend.abort(doomed)
        tokens = driver.backend.load().num_tokens_total
        driver.gather(doomed)
        load = driver.backend.load()
        assert (load.num_running, load.num_waiting) == (0, 0)
        assert load.num_tokens_total - tokens <= len(doomed)


def test_an_aborted_request_makes_room_for_the_next_though_the_engine_is_paused(folder: Path, kind: str) -> None:
    with engine(folder, kind, num_slots=2) as driver:
        long = [ask(name, prompt_of(4), seed=1, max_new_tokens=200, temperature=0.0) for name in ("long", "kept")]
        driver.submit(*long, ask("next", prompt_of(5), max_new_tokens=3))
        driver.until(lambda: "long" in driver.replies, wait_s=0.005)
        driver.do(driver.backend.pause())
        driver.poll(0.0)
        before, tokens = driver.backend.load(), list(driver.replies["long"].token_ids)
        assert (before.num_running, before.num_waiting) == (2, 1)
        driver.backend.abort(["long"])
        aborted = driver.gather(["long"])[0]
        assert (aborted.finishes, aborted.token_ids) == (["aborted"], tokens)
        after = driver.backend.load()
        assert (after.num_running, after.num_waiting, after.num_tokens_total) == (1, 1, before.num_tokens_total)
        driver.do(driver.backend.resume())
        follower = driver.gather(["next"])[0]
        assert follower.slot == aborted.slot
        assert follower.started >= aborted.ended


def test_last_chunks_say_who_held_which_slot_and_when(folder: Path, kind: str) -> None:
    with engine(folder, kind, num_slots=3) as driver:
        before = time.time()
        names = [f"r{i}" for i in range(24)]
        driver.submit(*(ask(name, prompt_of(1 + 3 * i), i, max_new_tokens=1 + i % 7) for i, name in enumerate(names)))
        driver.poll(0.0)
        driver.backend.abort(names[::5])
        replies = [reply for reply in driver.gather(names) if reply.slot >= 0]
        after = time.time()
    assert {reply.slot for reply in replies} == {0, 1, 2}
    assert all(before <= reply.started <= reply.ended <= after for reply in replies)
    assert all(reply.slot >= 0 for reply in driver.replies.values() if reply.token_ids)
    for slot in range(3):
        stays = sorted((reply.started, reply.ended) for reply in replies if reply.slot == slot)
        assert all(left <= taken for (_, left), (taken, _) in pairwise(stays))


def test_a_request_that_never_got_a_slot_names_none(driver: Driver) -> None:
    driver.do(driver.backend.pause())
    driver.submit(ask("waiting", prompt_of(4)), ask("refused", []))
    driver.backend.abort(["waiting"])
    for reply in driver.gather(["waiting", "refused"]):
        assert (reply.slot, reply.started, reply.ended) == (-1, 0.0, 0.0)


def test_an_engine_says_whether_it_may_compute(folder: Path, kind: str) -> None:
    with engine(folder, kind, started=False) as driver:
        backend = driver.backend
        seen = [backend.load().paused]
        driver.start()
        for action in (None, backend.pause, backend.resume, backend.sleep, backend.wake):
            if action is not None:
                driver.do(action())
            seen.append(backend.load().paused)
        driver.start()
        with pytest.raises(WeightSyncError):
            driver.do(backend.update(Version(0, 1), iter([]), "keep"))
        seen.append(backend.load().paused)
    assert seen == [True, False, True, False, True, True, True]


def test_deadlines_hold_running_waiting_and_paused(folder: Path, kind: str) -> None:
    with engine(folder, kind, num_slots=1) as driver:
        driver.do(driver.backend.pause())
        start = time.monotonic()
        driver.submit(ask("first", prompt_of(4), deadline_s=0.1), ask("second", prompt_of(5), deadline_s=0.15), ask("third", prompt_of(5)))
        first, second = driver.gather(["first", "second"])
        assert first.finishes == second.finishes == ["deadline"]
        assert 0.1 < time.monotonic() - start < 5
        driver.do(driver.backend.resume())
        assert driver.gather(["third"])[0].finishes[0] in ("stop", "length")


def test_poll_waits_for_a_finish_and_not_longer_than_asked(driver: Driver) -> None:
    start = time.monotonic()
    assert driver.poll(0.1) == []
    assert 0.09 < time.monotonic() - start < 3
    driver.submit(ask("quick", prompt_of(4), max_new_tokens=2, stop_token_ids=()))
    start = time.monotonic()
    assert [chunk.finish for chunk in driver.poll(20.0)] in (["length"], ["stop"])
    assert time.monotonic() - start < 5


def test_a_cancelled_poll_loses_nothing(driver: Driver) -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(driver.backend.poll(10.0))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    driver.do(cancelled())
    assert len(driver.generate(ask("after", prompt_of(4)))) == 1


def changed(weights: dict[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    return {name: tensor * factor for name, tensor in weights.items()}


def test_weights_change_in_place_between_two_tokens(driver: Driver, folder: Path, kind: str, tmp_path: Path) -> None:
    other = make_model(tmp_path, seed=1, kind=kind)
    prompt = prompt_of(10)
    driver.submit(*(ask(f"r{i}", prompt, seed=i, max_new_tokens=200, temperature=1.3) for i in range(8)))
    driver.until(lambda: bool(driver.replies), wait_s=0.005)
    driver.do(driver.backend.pause())  # so that some are unfinished on the slowest machine
    sums = driver.update(4, tensors(other), "recompute")
    driver.do(driver.backend.resume())
    assert sums == {name: checksum(tensor) for name, tensor in tensors(other).items()}
    assert driver.backend.load().version == driver.version(4)
    mixed = 0
    for reply in driver.gather([f"r{i}" for i in range(8)]):
        split = reply.token_version.count(0)
        assert reply.token_version == [0] * split + [4] * (len(reply.token_ids) - split)
        # With the cache recomputed, every token's log-probability is that of a plain forward with the weights that sampled it.
        expected = own_logp(folder, prompt, reply.token_ids, 1.3)[:split] + own_logp(other, prompt, reply.token_ids, 1.3)[split:]
        torch.testing.assert_close(reply.logp, expected, atol=2e-4, rtol=0)
        mixed += 0 < split < len(reply.token_ids)
    assert mixed


def test_keeping_the_cache_goes_on_at_once(driver: Driver) -> None:
    weights = changed(tensors(driver.folder), 1.01)
    driver.submit(ask("r", prompt_of(10), seed=1, max_new_tokens=200, temperature=1.3))
    driver.until(lambda: bool(driver.replies), wait_s=0.005)
    driver.update(1, weights)
    reply = driver.gather(["r"])[0]
    assert len(reply.finishes) == 1
    assert reply.token_version == sorted(reply.token_version)


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "twice", "source"])
def test_a_failed_update_keeps_the_engine_out_of_service(driver: Driver, fault: str) -> None:
    weights = tensors(driver.folder)
    expected = driver.generate(ask("before", prompt_of(8), seed=2))[0].token_ids
    first, *rest = weights
    buckets = {
        "missing": bucketed({name: weights[name] for name in rest}),
        "unknown": bucketed({**weights, "model.no_such.weight": weights[first]}),
        "shape": bucketed({**weights, first: weights[first][:-1]}),
        "twice": iter([[*weights.items(), (first, weights[first])]]),
        "source": broken(weights),
    }[fault]
    with pytest.raises((WeightSyncError, OSError)):
        driver.do(driver.backend.update(driver.version(1), buckets, "keep"))
    driver.submit(ask("after", prompt_of(8), seed=2))
    with pytest.raises(DrumrollError):
        driver.do(driver.backend.resume())
    assert driver.poll(0.05) == []
    driver.update(1)
    driver.do(driver.backend.resume())
    reply = driver.gather(["after"])[0]
    assert reply.token_ids == expected
    assert set(reply.token_version) == {1}


def broken(weights: dict[str, torch.Tensor]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    yield list(weights.items())[:2]
    raise OSError("the sender is gone")


def test_older_weights_are_refused_and_change_nothing(driver: Driver) -> None:
    expected = driver.generate(ask("before", prompt_of(8), seed=2))[0].token_ids
    driver.update(3)
    with pytest.raises(WeightSyncError, match="older"):
        driver.update(2, changed(tensors(driver.folder), 0.5))
    reply = driver.generate(ask("after", prompt_of(8), seed=2))[0]
    assert reply.token_ids == expected
    assert set(reply.token_version) == {3}
    newer = Version(driver.epoch + 1, 0)
    assert driver.do(driver.backend.update(newer, bucketed(tensors(driver.folder)), "keep"))
    assert driver.backend.load().version == newer


@pytest.mark.parametrize("updates", [False, True])
def test_sleep_keeps_tokens_and_weights(driver: Driver, updates: bool) -> None:
    request = ask("r", prompt_of(20), seed=4, max_new_tokens=200, temperature=1.2)
    expected = driver.generate(ask("undisturbed", list(request.token_ids), 4, max_new_tokens=200, temperature=1.2))[0].token_ids
    driver.submit(request)
    driver.until(lambda: "r" in driver.replies, wait_s=0.003)
    driver.do(driver.backend.sleep())
    driver.do(driver.backend.sleep())  # a second time changes nothing
    with pytest.raises(DrumrollError, match="asleep"):
        driver.do(driver.backend.resume())
    with pytest.raises(DrumrollError, match="asleep"):
        driver.update(1)
    driver.do(driver.backend.wake())
    driver.do(driver.backend.wake())
    assert driver.backend.load().paused
    if updates:
        driver.update(1)
    driver.do(driver.backend.resume())
    assert driver.gather(["r"])[0].token_ids == expected


def test_close_drops_what_is_unfinished(folder: Path, kind: str) -> None:
    with engine(folder, kind) as driver:
        driver.submit(*(ask(f"{i}", prompt_of(5), max_new_tokens=200) for i in range(40)))
