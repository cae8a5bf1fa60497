"""Small servers in a thread of this process that go wrong as they are told, and a model of given answers."""

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import contextmanager

import numpy as np
from aiohttp import WSMsgType, web

from titan_rl.data.seeds import named_seed
from titan_rl.data.types import Completion, Group, Prompt, Request, Sampling
from titan_rl.environments.agents.endpoint import Endpoint
from titan_rl.environments.interfaces.score import Score
from titan_rl.environments.interfaces.task import Task
from titan_rl.environments.rollout.group import run_group


@contextmanager
def serving(app: web.Application):
    """Its port on loopback; the server and all its connections end with the block."""
    up, started = threading.Event(), []

    async def serve() -> None:
        runner, over = web.AppRunner(app, shutdown_timeout=0.1), asyncio.Event()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        started.append((runner.addresses[0][1], asyncio.get_running_loop(), over))
        up.set()
        await over.wait()
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=[serve()], daemon=True)
    thread.start()
    assert up.wait(60)
    [(port, loop, over)] = started
    try:
        yield port
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
        assert not thread.is_alive()


class FakeOpenEnv:
    """Counts up to ``length`` steps, each of which pays the length of its word over ten."""

    def __init__(self, *, limit: int = 1, length: int = 3, on: dict[str, Callable] | None = None, refusals: int = 0):
        """``on``: by the type of a message, what answers in its place: text, or None for none and a closed socket.
        ``refusals``: connections that are refused with 503 before the first that is not."""
        self.limit, self.length, self.on, self.refusals = limit, length, on or {}, refusals
        self.active = self.most = 0
        self.resets: list[dict] = []
        self.headers: list[dict] = []
        self.app = web.Application()
        self.app.router.add_get("/ws", self.serve)
        self.app.router.add_get("/schema", self.schema)

    async def schema(self, request):
        word = {"properties": {"word": {"type": "string"}}, "required": ["word"], "additionalProperties": False}
        return web.json_response({"action": word})

    async def serve(self, request):
        self.headers.append(dict(request.headers))
        if self.refusals:
            self.refusals -= 1
            return web.Response(status=503)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.active >= self.limit:
            await socket.send_str(error("CAPACITY_REACHED", "at capacity"))
            await socket.close()
            return socket
        self.active += 1
        self.most = max(self.most, self.active)
        try:
            await self.play(socket)
        finally:
            self.active -= 1
        await socket.close()
        return socket

    async def play(self, socket) -> None:
        count = 0
        async for message in socket:
            if message.type != WSMsgType.TEXT or (said := json.loads(message.data))["type"] == "close":
                return
            kind, data = said["type"], said.get("data", {})
            if kind in self.on:
                answer = self.on[kind](data)
                answer = await answer if asyncio.iscoroutine(answer) else answer
                if answer is None:
                    socket._writer.transport.abort()
                    return
                await socket.send_str(answer)
                continue
            if kind == "reset":
                self.resets.append(data)
                await socket.send_str(observation(f"seed {data['seed']}", 0.0, False))
            elif set(data) != {"word"}:
                await socket.send_str(error("VALIDATION_ERROR", "Invalid message", [{"loc": ["word"], "msg": "no"}]))
            else:
                count += 1
                done = count >= self.length
                await socket.send_str(observation(f"{data['word']} {count}", len(data["word"]) / 10, done))


def observation(board, reward=0.0, done=False) -> str:
    return json.dumps({"type": "observation", "data": dict(observation={"board": board}, reward=reward, done=done)})


def error(code: str, message: str, errors=()) -> str:
    return json.dumps({"type": "error", "data": {"code": code, "message": message, "errors": list(errors)}})


class FakeNemoGym:
    """A counter of each session, by cookie, as the resources server of that name has it."""

    def __init__(self, on: dict[str, Callable] | None = None):
        """``on``: by path, what answers in its place."""
        self.on, self.counters, self.seen = on or {}, {}, []
        self.app = web.Application()
        self.app.router.add_post("/{path}", self.serve)

    async def serve(self, request):
        path, body = request.match_info["path"], await request.json()
        self.seen.append((path, body))
        if path in self.on:
            answer = self.on[path](body)
            return await answer if asyncio.iscoroutine(answer) else answer
        session = request.cookies.get("session")
        if path == "seed_session":
            session = f"s{len(self.counters)}"
            self.counters[session] = body["initial_count"]
            response = web.json_response({})
            response.set_cookie("session", session)
            return response
        if path == "increment_counter":
            if not isinstance(body.get("count"), int):
                return web.json_response({"detail": "count: Field required"}, status=422)
            self.counters[session] += body["count"]
            return web.json_response({"success": True})
        if path == "get_counter_value":
            return web.json_response({"count": self.counters[session]})
        if path == "verify":
            return web.json_response({"reward": float(self.counters[session] == body["expected_count"])})
        return web.json_response({"detail": "Not Found"}, status=404)


def play(
    task: Task, prompt: Prompt, answers: list[list[str]], tokenizer, *, step_timeout: float = 20, max_tokens: int = 512
) -> tuple[Group, list[Request]]:
    """A group of as many samples as there are lists of answers, and the requests that the generator got. Sample number
    i gives its own list, one answer a turn."""
    requests = []

    async def ask(request: Request) -> list[Completion]:
        requests.append(request)
        return [completion(said_to(seed)) for seed in request.seeds]

    def said_to(seed: int) -> str:
        """By the names of the group's seeds."""
        turns = [(sample, turn) for sample, given in enumerate(answers) for turn in range(len(given))]
        [(sample, turn)] = [each for each in turns if named_seed(1, prompt.id, *each) == seed]
        return answers[sample][turn]

    def completion(text: str) -> Completion:
        tokens = np.array([*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id], np.int32)
        return Completion(tokens, np.full(len(tokens), -0.5), np.zeros(len(tokens)), "stop")

    async def score(prompt, rollouts):
        return [Score("ok", task.score(prompt, said)) for said in rollouts], 0.0

    sampling = Sampling(num_samples=len(answers), max_new_tokens=32, temperature=1.0, max_tokens=max_tokens)
    parts = dict(tokenizer=tokenizer, ask=ask, score=score, sampling=sampling, seed=1, step_timeout=step_timeout)

    async def group() -> Group:
        if not hasattr(task, "agent"):
            return await run_group(prompt, task=task, **parts)
        await (endpoint := Endpoint()).start()
        try:
            return await run_group(prompt, task=task, endpoint=endpoint, **parts)
        finally:
            await endpoint.close()
            if hasattr(task, "close"):
                await task.close()

    return asyncio.run(group()), requests
