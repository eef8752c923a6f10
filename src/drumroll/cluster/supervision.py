"""Watches workers by what they do, and replaces those that are lost.

                       ┌── vigil: a call that never ends; it fails the moment the process does
    watch of a worker ─┼── ping: answered by a worker that is not frozen, whatever it computes
                       └── pulse: of a role whose workers can say that they get on with their work (an engine: by a token)
            │
            ▼ lost
    out(rank) ──► pause, longer each time ──► Cluster.replace ──► back(rank) ──► watch of its successor
            │
            └── restarts used up: nobody comes back; the last one takes the role with it (`RoleLost`)

Seconds of silence are counted only while this process itself is awake, and in small bites: a machine that is overloaded or was asleep
must not look like one whose workers are frozen.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from drumroll.cluster.cluster import Cluster, Handle
from drumroll.config.models import SupervisionConfig
from drumroll.errors import NodeLost, RoleLost, WorkerError, WorkerLost

PING_EVERY_S = 2.0
PULSE_EVERY_S = 5.0
MAX_PINGS_PER_S = 500
"""Of one role: the workers of a large one are asked less often."""
TICK_S = 0.5
"""Silence is counted in bites of at most twice this long."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
"""Before a worker is replaced that was lost soon after it had come up, or did not come up at all; doubled as long as that goes on."""
CALM_S = 10.0
"""A worker that was up for this long is replaced at once."""
MAX_LAUNCHES = 16
"""Workers that are replaced at the same time."""


class Budget:
    """How often the workers of a role may be replaced, and how soon."""

    def __init__(self, config: SupervisionConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._spent: deque[float] = deque()
        self._pauses: dict[int, float] = {}
        """By rank: the last one."""
        self._up_since: dict[int, float | None] = {}
        """By rank that was replaced; None while it is on its way."""

    def spend(self, rank: int = 0) -> float | None:
        """Take one restart; how long to wait before it, or None where there is none left."""
        now = self._clock()
        while self._spent and self._spent[0] <= now - self._config.window_s:
            self._spent.popleft()
        if len(self._spent) >= self._config.max_restarts:
            return None
        up_since = self._up_since.get(rank, -math.inf)
        is_calm = up_since is not None and now - up_since >= CALM_S
        self._pauses[rank] = 0.0 if is_calm else min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pauses.get(rank, 0.0)))
        self._up_since[rank] = None
        self._spent.append(now)
        return self._pauses[rank]

    def is_up(self, rank: int = 0) -> None:
        """What took its place has come up."""
        self._up_since[rank] = self._clock()

    def __str__(self) -> str:
        return f"{self._config.max_restarts} within {self._config.window_s:g} s (`supervision.max_restarts`, `supervision.window_s`)"


@dataclass(frozen=True, slots=True)
class Check:
    """One way to see that a worker is well: a call that must end within a time."""

    ask: Callable[[Handle], Awaitable[object]]
    every_s: float
    patience_s: float
    complaint: str
    """What a worker that does not answer is said not to have done."""
    hint: str = ""


@dataclass(eq=False)
class Ward:
    """A role under supervision."""

    cluster: Cluster
    checks: tuple[Check, ...]
    out: Callable[[int, WorkerError], None]
    """A rank is lost. Called once for each loss, from the supervisor's thread."""
    back: Callable[[int], None] | None
    """A rank has been replaced, and its worker is up. None: nobody is replaced; whoever uses the role sees to that."""
    lost: Callable[[RoleLost], None]
    """Nobody is left, and nobody will come."""
    budget: Budget
    away: set[int] = field(default_factory=set)
    """Ranks that are being replaced."""
    gone: set[int] = field(default_factory=set)
    """Ranks that stay away."""
    is_let_go: bool = False


class Supervisor:
    """Watches the workers of any number of clusters from a thread of its own. A context manager.

    with Supervisor(cfg.supervision, say=rec.warn) as supervisor:
        supervisor.guard(engines, out=..., back=..., lost=..., pulse_s=60.0)
    """

    def __init__(
        self, config: SupervisionConfig, say: Callable[[str, str], None], register: Callable[[Handle], None] = lambda handle: None
    ) -> None:
        """`say` is told of every loss and every return: what kind of incident, and a sentence. `register` is told of every worker that is
        watched."""
        self._config = config
        self.say = say
        self._register = register
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="supervisor", daemon=True)
        self._launches = ThreadPoolExecutor(MAX_LAUNCHES, thread_name_prefix="replacing")
        self._watches: set[asyncio.Task[None]] = set()
        self._is_over = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._launches.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """From now on nobody is missed."""
        self._is_over = True

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def guard(
        self,
        cluster: Cluster,
        *,
        out: Callable[[int, WorkerError], None] = lambda rank, error: None,
        back: Callable[[int], None] | None = None,
        lost: Callable[[RoleLost], None] = lambda error: None,
        silence_s: float | None = None,
        pulse_s: float | None = None,
        hint: str = "",
    ) -> Ward:
        """Watch every worker of a role from now on, and replace those that are lost if somebody waits for them to come `back`.

        One that answers nothing for `silence_s` is lost, too; `supervision.silence_s` where that is not given. With `pulse_s` its workers
        have a method `pulse`, which must return within that time. `hint` says what else silence may mean."""
        every_s = max(PING_EVERY_S, cluster.world / MAX_PINGS_PER_S)
        silence_s = silence_s or self._config.silence_s
        checks = [Check(lambda handle: handle.ping(deadline_s=float("inf")), every_s, silence_s, "answered", hint)]
        if pulse_s is not None:
            checks.append(
                Check(
                    lambda handle: handle.call("pulse", deadline_s=float("inf")),
                    max(PULSE_EVERY_S, every_s),
                    pulse_s,
                    "got on with its work",
                )
            )
        ward = Ward(cluster, tuple(checks), out, back, lost, Budget(self._config))
        for rank in range(cluster.world):
            self._watch(ward, rank)
        return ward

    def let_go(self, ward: Ward) -> None:
        """From now on nobody of this role is missed."""
        ward.is_let_go = True

    def sick(self, ward: Ward, rank: int, error: WorkerError) -> None:
        """Somebody found that a worker, though alive, is of no use: it is ended, and with that replaced."""
        self._loop.call_soon_threadsafe(self._report, ward, rank, ward.cluster.handles[rank], error)

    # Watching. Everything below runs on the supervisor's loop, but for `_replace`.

    def _watch(self, ward: Ward, rank: int) -> None:
        handle = ward.cluster.handles[rank]
        self._register(handle)

        def begin() -> None:
            watch = asyncio.create_task(self._stand_by(ward, rank, handle))
            self._watches.add(watch)
            watch.add_done_callback(self._watches.discard)

        self._loop.call_soon_threadsafe(begin)

    async def _stand_by(self, ward: Ward, rank: int, handle: Handle) -> None:
        """Until the worker is lost, by whatever sign comes first."""
        vigil = asyncio.wrap_future(handle.vigil())
        checks = [asyncio.create_task(self._keep_asking(check, handle)) for check in ward.checks]
        try:
            done, _ = await asyncio.wait({vigil, *checks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (vigil, *checks):
                task.cancel()
            await asyncio.gather(*checks, return_exceptions=True)
        error = vigil.exception() if vigil in done else next(task for task in checks if task in done).exception()
        if not isinstance(error, WorkerError):
            error = WorkerLost(f"{handle.where}: {error}")
        self._report(ward, rank, handle, error)

    async def _keep_asking(self, check: Check, handle: Handle) -> None:
        """Raises when the worker does not answer in time, or with an error."""
        while True:
            await asyncio.sleep(check.every_s)
            answer = asyncio.ensure_future(check.ask(handle))
            try:
                if not await answered_within(answer, check.patience_s):
                    raise WorkerLost(f"{handle.where}: it has not {check.complaint} for {check.patience_s:g} s, and was ended.{check.hint}")
                answer.result()
            finally:
                answer.cancel()

    def _report(self, ward: Ward, rank: int, handle: Handle, error: WorkerError) -> None:
        """A worker is lost. Of several reports of one loss the first counts."""
        if self._is_over or ward.is_let_go or rank in ward.away or rank in ward.gone or ward.cluster.handles[rank] is not handle:
            return
        handle.kill()
        ward.away.add(rank)
        self.say("worker lost", f"{error}")
        ward.out(rank, error)
        if ward.back is None:
            ward.away.discard(rank)
            ward.gone.add(rank)
            return
        self._send_for_another(ward, rank, error)

    def _send_for_another(self, ward: Ward, rank: int, error: WorkerError) -> None:
        pause_s = ward.budget.spend(rank)
        if pause_s is None:
            self._give_up(ward, rank, error, f"restarts are used up: {ward.budget}")
            return
        self._loop.call_later(pause_s, lambda: self._launches.submit(self._replace, ward, rank))

    def _replace(self, ward: Ward, rank: int) -> None:
        """In a thread of its own: launching takes seconds."""
        assert ward.back is not None
        if self._is_over:
            return
        began = time.monotonic()
        try:
            handle = ward.cluster.replace(rank)
        except NodeLost as error:
            self._loop.call_soon_threadsafe(self._give_up, ward, rank, error, "node is gone")
            return
        except Exception as error:
            if not self._is_over:
                failed = error if isinstance(error, WorkerError) else WorkerLost(f"{ward.cluster.role} rank {rank}: {error}")
                self.say("worker not replaced", f"{failed}")
                self._loop.call_soon_threadsafe(self._send_for_another, ward, rank, failed)
            return
        self.say("worker replaced", f"{handle.where}: up again after {time.monotonic() - began:.1f} s.")
        ward.budget.is_up(rank)
        ward.away.discard(rank)
        self._watch(ward, rank)
        try:
            ward.back(rank)
        except Exception as error:
            self.sick(ward, rank, error if isinstance(error, WorkerError) else WorkerLost(f"{handle.where}: {error}"))

    def _give_up(self, ward: Ward, rank: int, error: WorkerError, why: str) -> None:
        ward.away.discard(rank)
        ward.gone.add(rank)
        left = ward.cluster.world - len(ward.gone)
        self.say("worker given up", f"{ward.cluster.handles[rank].where} is not replaced: its {why}. {left} of its role are left.")
        if not left:
            ward.lost(role_lost(ward.cluster, rank, error, why))


def role_lost(cluster: Cluster, rank: int, error: WorkerError, why: str) -> RoleLost:
    """What is said when a role cannot go on: who, where, its last words, what to do."""
    words = cluster.last_words(rank)
    indented = "".join(f"\n    {line}" for line in words.splitlines())
    return RoleLost(
        f"{cluster.role}: nobody is left to do its work, and its {why}. The last one: {error}"
        + (f"\n  Its last words:{indented}" if words else "")
        + "\nPut right what ends these workers, or raise the budget; then `drumroll resume` goes on with the run."
    )


async def answered_within(answer: asyncio.Future[object], patience_s: float) -> bool:
    """Whether a call ended in time, by a clock that stands still while this process does."""
    loop, waited_s = asyncio.get_running_loop(), 0.0
    while not answer.done() and waited_s < patience_s:
        began = loop.time()
        await asyncio.wait({answer}, timeout=min(TICK_S, patience_s - waited_s))
        waited_s += min(loop.time() - began, 2 * TICK_S)
    return answer.done()
