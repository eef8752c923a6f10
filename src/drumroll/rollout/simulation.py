"""A cluster in one process and in virtual time: thousands of engines under the very scheduler that runs real ones.

    async def main():
        cluster = SimulatedCluster(workload, num_engines=10_000, slots=16, num_workers=160)
        scheduler = RolloutScheduler(cluster, seed=1, limits=Limits(), clock=cluster.clock)
        ...
    simulate(main())

Nothing here waits for real time: when all tasks wait, the clock jumps to the next timer. Everything depends on seeds alone, so
that a schedule repeats exactly, faults included. A simulation in which everybody waits for nothing raises `Deadlock`.
Engines are modelled by their slots: a reply of n tokens takes n × `token_s` ÷ speed in one of them.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, TypeVar

from drumroll.errors import DrumrollError, WorkerLost
from drumroll.life import State, last_state, stamp, unpack_life
from drumroll.rollout.lease import Lease, WorkerReport
from drumroll.types import Fault, SampleInfo, StopReason

T = TypeVar("T")


class Deadlock(DrumrollError):
    """Every task waits, and no timer will wake any of them."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop without files and sockets, whose clock jumps from timer to timer. Timers of one time fire in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_timers = 0
        self._turn: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        """What the base class is about to run."""

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.TimerHandle:  # type: ignore[override]
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._num_timers += 1
        heappush(self._timers, (when, self._num_timers, timer))
        return timer

    def _run_once(self) -> None:
        """One turn: everything that is ready, and what the timers add that are due."""
        turn, timers = self._turn, self._timers
        if not turn and not self._stopping:  # type: ignore[attr-defined]
            while timers and timers[0][2].cancelled():
                heappop(timers)
            if not timers:
                raise Deadlock("every task of the simulation waits, and no timer is set")
            self.now = max(self.now, timers[0][0])
        while timers and timers[0][0] <= self.now:
            turn.append(heappop(timers)[2])
        for _ in range(len(turn)):
            handle = turn.popleft()
            if not handle.cancelled():
                handle._run()

    def _write_to_self(self) -> None:
        pass


def simulate(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


@dataclass(frozen=True, slots=True)
class Script:
    """How one attempt at a sample goes, if nothing interferes."""

    turns: tuple[tuple[int, float], ...]
    """Tokens of each reply, and how long the environment thinks about it."""
    reward_s: float = 0.0
    reward: float = 1.0
    hangs_at: float | None = None
    """The reply stops growing after this share of its first turn's tokens."""
    fails: Fault = ""
    """Who fails at the end, if anybody."""

    @property
    def num_tokens(self) -> int:
        return sum(tokens for tokens, _ in self.turns)


Workload = Callable[[Lease], Script]
"""A pure function of the lease: the same seed and attempt give the same script."""


@dataclass(eq=False, slots=True)
class _Episode:
    lease: Lease
    script: Script
    worker: _Worker
    engine: _Engine
    turn: int = 0
    num_tokens: int = 0
    """Of turns that have ended."""
    life: bytes = b""
    oldest_version: int = -1
    newest_version: int = -1
    submitted_at: float = 0.0
    started_at: float = -1.0
    slot: int = -1
    timer: asyncio.TimerHandle | None = None
    gives_up_at: float = 0.0

    def wait(self, delay_s: float, then: Callable[[_Episode], None]) -> None:
        """Go on with `then`, or give up where that is beyond the deadline."""
        loop = self.worker.cluster.loop
        if loop.now + delay_s > self.gives_up_at:
            self.timer = loop.call_at(max(loop.now, self.gives_up_at), self.worker.give_up, self)
        else:
            self.timer = loop.call_later(delay_s, then, self)


@dataclass(eq=False)
class _Engine:
    """Slots, and a queue in front of them."""

    cluster: SimulatedCluster
    rank: int
    num_slots: int
    speed: float
    free: list[int] = field(init=False)
    running: dict[int, _Episode] = field(default_factory=dict)
    waiting: deque[_Episode] = field(default_factory=deque)
    is_dead: bool = False
    is_lost: bool = False
    is_hung: bool = False

    def __post_init__(self) -> None:
        self.free = list(range(self.num_slots))[::-1]

    def submit(self, episode: _Episode) -> None:
        now = self.cluster.loop.now
        episode.submitted_at = now
        if self.is_dead:
            episode.worker.end(episode, "failed", "engine", f"engine {self.rank} is gone")
            return
        if self.is_hung:
            episode.life += stamp("waiting", now, -1, self.rank)
            self.waiting.append(episode)
            episode.wait(episode.lease.stall_s, self.stall)
        elif self.free:
            self.start(episode)
        else:
            episode.life += stamp("waiting", now, -1, self.rank)
            self.waiting.append(episode)

    def start(self, episode: _Episode) -> None:
        loop, script = self.cluster.loop, episode.script
        episode.slot = self.free.pop()
        self.running[episode.slot] = episode
        episode.started_at = loop.now
        version = self.cluster.version
        if episode.oldest_version < 0:
            episode.oldest_version = version
        episode.newest_version = version
        episode.life += stamp("generating", loop.now, version, self.rank, episode.slot)
        duration_s = script.turns[episode.turn][0] * self.cluster.token_s / self.speed
        if script.hangs_at is not None and episode.turn == 0:
            episode.wait(duration_s * script.hangs_at + episode.lease.stall_s, self.stall)
        else:
            episode.wait(duration_s, self.finish)

    def finish(self, episode: _Episode) -> None:
        if self.cluster.continues:
            episode.newest_version = self.cluster.version
        episode.num_tokens += episode.script.turns[episode.turn][0]
        episode.life += stamp("environment", self.cluster.loop.now, -1, episode.worker.rank)
        self.leave(episode)
        episode.worker.step(episode)

    def stall(self, episode: _Episode) -> None:
        self.drop(episode)
        episode.worker.end(episode, "deadline", "engine", f"no token of engine {self.rank} for {episode.lease.stall_s:g} s")

    def drop(self, episode: _Episode) -> None:
        """The request ends before its reply does; its tokens so far count."""
        if episode.timer is not None:
            episode.timer.cancel()
        if episode.slot >= 0:
            if self.cluster.continues:
                episode.newest_version = self.cluster.version
            elapsed_s = self.cluster.loop.now - episode.started_at
            sampled = int(elapsed_s * self.speed / self.cluster.token_s)
            episode.num_tokens += min(sampled, episode.script.turns[episode.turn][0])
            self.leave(episode)
        elif episode in self.waiting:
            self.waiting.remove(episode)

    def leave(self, episode: _Episode) -> None:
        self.cluster.occupied_s += self.cluster.loop.now - episode.started_at
        del self.running[episode.slot]
        self.free.append(episode.slot)
        episode.slot = -1
        if self.waiting and not self.is_hung:
            self.start(self.waiting.popleft())

    def kill(self) -> None:
        self.is_dead = True
        for episode in [*self.running.values(), *self.waiting]:
            if episode.timer is not None:
                episode.timer.cancel()
        episodes = [*self.running.values(), *self.waiting]
        self.cluster.occupied_s += sum(self.cluster.loop.now - episode.started_at for episode in self.running.values())
        self.running.clear()
        self.waiting.clear()
        self.free = list(range(self.num_slots))[::-1]
        for episode in episodes:
            episode.slot = -1
            episode.worker.end(episode, "failed", "engine", f"engine {self.rank} died")

    def revive(self) -> None:
        self.is_dead = self.is_lost

    def lose(self) -> None:
        """It dies, and nothing brings it back."""
        self.is_lost = True
        self.kill()

    def slow_down(self, factor: float) -> None:
        """Replies that begin from now on come at `factor` of the speed."""
        self.speed *= factor

    def hang(self) -> None:
        """No token comes any more: whoever is in it, or comes, is given up after `stall_s`."""
        self.is_hung = True
        for episode in [*self.running.values(), *self.waiting]:
            if episode.timer is not None:
                episode.timer.cancel()
            episode.wait(episode.lease.stall_s, self.stall)

    def recover(self) -> None:
        self.is_hung = False
        waiting, self.waiting = self.waiting, deque()
        for episode in waiting:
            if episode.timer is not None:
                episode.timer.cancel()
            if self.free:
                self.start(episode)
            else:
                self.waiting.append(episode)


@dataclass(eq=False)
class _Worker:
    """Runs episodes; holds results until they are fetched."""

    cluster: SimulatedCluster
    rank: int
    episodes: dict[tuple[str, int], _Episode] = field(default_factory=dict)
    results: list[SampleInfo] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    reachable: asyncio.Event = field(default_factory=asyncio.Event)
    is_dead: bool = False

    def __post_init__(self) -> None:
        self.reachable.set()

    def begin(self, lease: Lease) -> None:
        cluster = self.cluster
        episode = _Episode(lease, cluster.workload(lease), self, cluster.engines[lease.engine])
        episode.gives_up_at = cluster.loop.now + lease.deadline_s
        self.episodes[lease.sample_id, lease.attempt] = episode
        episode.engine.submit(episode)

    def step(self, episode: _Episode) -> None:
        """A reply has come: the environment thinks about it."""
        env_s = episode.script.turns[episode.turn][1]
        if env_s > 0:
            episode.wait(env_s, self.next_turn)
        else:
            self.next_turn(episode)

    def next_turn(self, episode: _Episode) -> None:
        episode.turn += 1
        if episode.turn < len(episode.script.turns):
            episode.engine.submit(episode)
        elif episode.script.reward_s > 0:
            episode.life += stamp("reward", self.cluster.loop.now, -1, self.rank)
            episode.wait(episode.script.reward_s, self.judge)
        else:
            self.judge(episode)

    def judge(self, episode: _Episode) -> None:
        if episode.script.fails:
            self.end(episode, "failed", episode.script.fails, "it fails by its script")
            return
        episode.life += stamp("done", self.cluster.loop.now, -1, self.rank)
        self.end(episode, "stop", "", "")

    def give_up(self, episode: _Episode) -> None:
        """The deadline has passed: whoever it waits for is at fault."""
        faults: dict[State, Fault] = {"environment": "environment", "reward": "reward"}
        fault = faults.get(last_state(episode.life), "engine")
        episode.engine.drop(episode)
        self.end(episode, "deadline", fault, f"the episode took longer than {episode.lease.deadline_s:g} s")

    def abort(self, sample_id: str, attempt: int) -> None:
        episode = self.episodes.get((sample_id, attempt))
        if episode is not None:
            episode.engine.drop(episode)
            self.end(episode, "aborted", "", "")

    def end(self, episode: _Episode, stop: StopReason, fault: Fault, error: str) -> None:
        lease = episode.lease
        if self.episodes.pop((lease.sample_id, lease.attempt), None) is None:
            return
        self.results.append(
            SampleInfo(
                sample_id=lease.sample_id,
                group_id=lease.group_id,
                task_id=lease.task.id,
                domain=lease.task.domain,
                reward=episode.script.reward if stop == "stop" else None,
                success=None,
                stop_reason=stop,
                num_prompt_tokens=1,
                num_new_tokens=episode.num_tokens,
                oldest_version=episode.oldest_version,
                newest_version=episode.newest_version,
                reward_parts=_NOTHING,
                metrics=_NOTHING,
                error=error,
                life=episode.life,
                attempt=lease.attempt,
                fault=fault,
            )
        )
        self.news.set()

    def kill(self) -> None:
        """Its process is gone, and with it every episode and every result that was not fetched."""
        self.is_dead = True
        for episode in list(self.episodes.values()):
            episode.engine.drop(episode)
        self.episodes.clear()
        self.results.clear()
        self.news.set()
        self.reachable.set()


_NOTHING: dict[str, float] = {}


class SimulatedCluster:
    """Engines and environment workers. Implements the scheduler's `Transport`; built inside the event loop of `simulate`."""

    def __init__(
        self,
        workload: Workload,
        *,
        num_engines: int,
        slots: int,
        num_workers: int = 1,
        token_s: float = 0.02,
        speeds: Sequence[float] = (1.0,),
        continues: bool = True,
        delay_s: float = 0.0,
    ) -> None:
        """`speeds` are given to the engines in turn. `continues`: unfinished replies go on with new weights; otherwise each keeps
        those that it began with. `delay_s` is how long a message to or from a worker travels."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), "a SimulatedCluster lives in `simulate`"
        self.loop = loop
        self.workload = workload
        self.token_s = token_s
        self.continues = continues
        self.delay_s = delay_s
        self.version = 0
        self.occupied_s = 0.0
        """By replies that have ended, one way or another."""
        self.published_at = [0.0]
        """When each version reached the engines."""
        self.engines = [_Engine(self, rank, slots, speeds[rank % len(speeds)]) for rank in range(num_engines)]
        self.workers = [_Worker(self, rank) for rank in range(num_workers)]
        self.slots = [slots] * num_engines

    def clock(self) -> float:
        return self.loop.now

    def slot_seconds(self) -> float:
        """How long slots have been occupied so far, all together."""
        now = self.loop.now
        return self.occupied_s + sum(now - episode.started_at for engine in self.engines for episode in engine.running.values())

    def push(self, version: int) -> None:
        """New weights reach all engines."""
        assert version == self.version + 1, "versions come one by one"
        self.version = version
        self.published_at.append(self.loop.now)

    def tokens_older_than(self, version: int, info: SampleInfo) -> float:
        """How many of a sample's tokens were sampled before `version` reached the engines."""
        if version <= info.oldest_version or version <= 0:
            return 0.0
        if not self.continues or version > info.newest_version:
            return float(info.num_new_tokens)
        border, before, total = self.published_at[version], 0.0, 0.0
        stamps = unpack_life(info.life)
        for this, following in pairwise(stamps):
            if this.state == "generating":
                total += following.time - this.time
                before += min(max(0.0, border - this.time), following.time - this.time)
        return info.num_new_tokens * before / total if total else 0.0

    # The scheduler's transport.

    @property
    def num_workers(self) -> int:
        return len(self.workers)

    async def lease(self, worker: int, leases: Sequence[Lease]) -> None:
        await self._reach(worker)
        for lease in leases:
            self.workers[worker].begin(lease)

    async def abort(self, worker: int, attempts: Sequence[tuple[str, int]]) -> None:
        await self._reach(worker)
        for sample_id, attempt in attempts:
            self.workers[worker].abort(sample_id, attempt)

    async def poll(self, worker: int, wait_s: float, linger_s: float) -> tuple[WorkerReport, Any]:
        await self._reach(worker)
        host = self.workers[worker]
        if not host.news.is_set():
            alarm = self.loop.call_later(wait_s, host.news.set)
            await host.news.wait()
            alarm.cancel()
        if linger_s and host.results and host.episodes:
            await asyncio.sleep(linger_s)
        await self._reach(worker)
        results, host.results = host.results, []
        host.news.clear()
        return WorkerReport(results), results

    async def _reach(self, worker: int) -> None:
        """Until a message is through. A worker that is cut off is reached when it is connected again; a dead one never."""
        host = self.workers[worker]
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        await host.reachable.wait()
        if host.is_dead:
            raise WorkerLost(f"environment worker {worker} is gone")


@dataclass(frozen=True, slots=True)
class Chaos:
    """Faults from a seed: how many of each kind strike within `span_s`, and how long they last."""

    seed: int
    span_s: float
    engine_kills: int = 0
    engine_hangs: int = 0
    engine_slowdowns: int = 0
    worker_kills: int = 0
    worker_cuts: int = 0
    node_losses: int = 0
    """A node is an environment worker and the engines that it shares a machine with."""
    lasts_s: float = 30.0

    def unleash(self, cluster: SimulatedCluster) -> None:
        """Set the timers. At least one worker and one engine survive."""
        rng, loop = random.Random(self.seed), cluster.loop
        engines, workers = len(cluster.engines), len(cluster.workers)
        mortal = list(range(1, workers))
        rng.shuffle(mortal)

        def at(count: int, strike: Callable[[], None]) -> None:
            for _ in range(count):
                loop.call_later(rng.uniform(0.0, self.span_s), strike)

        def engine_fault(begin: str, end: str) -> Callable[[], None]:
            def strike() -> None:
                engine = cluster.engines[rng.randrange(engines)]
                getattr(engine, begin)()
                loop.call_later(rng.expovariate(1.0 / self.lasts_s), getattr(engine, end))

            return strike

        def slow_down() -> None:
            engine, factor = cluster.engines[rng.randrange(engines)], rng.uniform(0.1, 0.9)
            engine.slow_down(factor)
            loop.call_later(rng.expovariate(1.0 / self.lasts_s), engine.slow_down, 1.0 / factor)

        def kill_worker() -> None:
            if mortal:
                cluster.workers[mortal.pop()].kill()

        def cut_off() -> None:
            host = cluster.workers[rng.randrange(workers)]
            host.reachable.clear()
            loop.call_later(rng.expovariate(1.0 / self.lasts_s), host.reachable.set)

        def lose_node() -> None:
            if mortal:
                rank = mortal.pop()
                cluster.workers[rank].kill()
                for engine in cluster.engines[rank::workers]:
                    engine.lose()

        at(self.engine_kills, engine_fault("kill", "revive"))
        at(self.engine_hangs, engine_fault("hang", "recover"))
        at(self.engine_slowdowns, slow_down)
        at(self.worker_kills, kill_worker)
        at(self.worker_cuts, cut_off)
        at(self.node_losses, lose_node)
