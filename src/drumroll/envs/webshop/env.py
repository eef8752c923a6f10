"""The environment `webshop`."""

from __future__ import annotations

import asyncio

from drumroll.envs.base import Env, Step, seed_of
from drumroll.envs.webshop.shop import open_shop
from drumroll.envs.webshop.visit import Visit, VisitConfig
from drumroll.errors import DataError
from drumroll.registry import register
from drumroll.types import Task

LARGE = 20_000
"""Searching so many products takes milliseconds, and is done in a thread."""


@register.env("webshop")
class WebShop(Env):
    """Shop for what an instruction asks: search, compare, choose options and buy. Success is a purchase with reward 1.

    The task's `seed` says which goal it is. The reward comes at the end; its parts are the metrics r_att, r_opt, r_price and r_type.
    """

    class Config(VisitConfig):
        """Options of the shop."""

    config: Config

    async def start(self, task: Task) -> Step:
        if "seed" not in task.data:
            raise DataError(f"task {task.id} has no `seed`, which says what to shop for. Give the data as `seeds`, such as 0-999.")
        shop = await asyncio.to_thread(open_shop, self.config.source)
        self._visit = Visit(self.config, shop, shop.goal(seed_of(task)))
        return self._visit.begin()

    async def step(self, reply: str) -> Step:
        if len(self._visit.shop.products) < LARGE:
            return self._visit.answer(reply)
        return await asyncio.to_thread(self._visit.answer, reply)
