"""Calls to actors as plain awaitables."""

import asyncio


async def gather(*calls) -> list:
    """Results in order. Monarch's futures are awaitable, and no more than that."""

    async def wait(call):
        return await call

    return await asyncio.gather(*(wait(call) for call in calls))


async def call_all(endpoint, *arguments) -> list:
    """Every rank's answer, by rank."""
    return list((await endpoint.call(*arguments)).values())
