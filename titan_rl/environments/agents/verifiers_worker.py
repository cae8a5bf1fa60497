"""Plays the episodes of a verifiers environment; needs ``verifiers`` and nothing of titan_rl: any Python will do.

    python verifiers_worker.py list SETTINGS     a line for each task, as JSON
    python verifiers_worker.py play SETTINGS     numbered lines in and out (json_lines_process.py)

SETTINGS is JSON: ``env`` as verifiers' own ``[env]`` table has it, ``folders`` to import from, and how many ``tasks``
to take. ``N {"task": 3, "hash": ..., "url": ..., "key": ..., "slot": 5}`` plays an episode; ``N null`` ends it.
"""

from __future__ import annotations  # its Python is the user's

import asyncio
import io
import itertools
import json
import os
import signal
import sys
import threading
from typing import Any, TextIO


def main() -> None:
    mode, settings = sys.argv[1], json.loads(sys.argv[2])
    output = os.fdopen(os.dup(1), "w", buffering=1)  # what an environment prints is no answer of ours
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # this process ends by a signal
    sys.path[:1] = settings["folders"]  # in the place of this file's folder
    os.environ["PYTHONPATH"] = os.pathsep.join(settings["folders"])  # of servers and programs that are started here
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    lines = _Lines()
    if mode == "play":
        threading.Thread(target=_end_with_parent, args=[lines], daemon=True).start()
    try:
        worker = Worker(settings)
    except Exception as error:
        output.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n")
        sys.exit(1)
    if mode == "list":
        worker.list_tasks(output)
    else:
        asyncio.run(worker.serve(lines, output))


class _Lines:
    """Of standard input, for an event loop that there may not be yet."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        self.lock = threading.Lock()

    def put(self, line: str) -> None:
        with self.lock:
            if self.loop is None:
                self.waiting.append(line)
            else:
                self.loop.call_soon_threadsafe(self.queue.put_nowait, line)

    def begin(self) -> asyncio.Queue[str]:
        with self.lock:
            self.loop, self.queue = asyncio.get_running_loop(), asyncio.Queue()
            for line in self.waiting:
                self.queue.put_nowait(line)
        return self.queue


def _end_with_parent(lines: _Lines) -> None:
    """Whatever this process is at: with its parent gone it ends, and with it all that it started."""
    for line in sys.stdin:
        lines.put(line)
    os.killpg(0, signal.SIGKILL)


class Worker:
    """Owner of the environment and its episodes."""

    def __init__(self, settings: dict[str, Any]):
        import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]  # of the user's own environment

        self.vf = vf
        self.env = vf.load_environment(vf.resolve_env_config(settings["env"]))
        self.tasks = list(itertools.islice(iter(self.env.taskset), settings["tasks"]))
        self.playing: dict[str, asyncio.Task[None]] = {}

    def list_tasks(self, output: TextIO) -> None:
        """Write a JSON line for each task: messages and hash."""
        for task in self.tasks:
            content = task.data.prompt
            messages = (
                [{"role": "user", "content": content}]
                if isinstance(content, str)
                else [_plain(m) for m in content or ()]
            )
            if task.data.system_prompt:
                messages = [{"role": "system", "content": task.data.system_prompt}, *messages]
            output.write(json.dumps({"messages": messages, "hash": task.hash}) + "\n")

    async def serve(self, lines: _Lines, output: TextIO) -> None:
        """Play episodes side by side, as requests come in."""
        queue = lines.begin()
        async with self.env.serving():
            output.write('"ready"\n')
            while True:
                number, _, text = (await queue.get()).partition(" ")
                request = json.loads(text)
                if request is None:
                    if number in self.playing:
                        self.playing[number].cancel()
                    continue
                self.playing[number] = asyncio.create_task(self._answer(number, request, output))
                self.playing[number].add_done_callback(lambda _, number=number: self.playing.pop(number, None))

    async def _answer(self, number: str, request: dict[str, Any], output: TextIO) -> None:
        try:
            reply = await self._play(request)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        output.write(f"{number} {json.dumps(reply)}\n")

    async def _play(self, request: dict[str, Any]) -> dict[str, Any]:
        task = self.tasks[request["task"]] if request["task"] < len(self.tasks) else None
        if task is None or task.hash != request["hash"]:
            return {
                "error": f"task {request['task']} is another one here: a taskset must load the same tasks each time"
            }
        os.environ[variable := f"TITAN_RL_KEY_{request['slot']}"] = request["key"]
        client = self.vf.EvalClientConfig(base_url=request["url"], api_key_var=variable)
        [slot] = self.env.slots(task)
        episode = await self.env.run_slot(slot, self.vf.ModelContext(model="policy", client=client))
        return _outcome(episode)


def _outcome(episode: Any) -> dict[str, Any]:
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors and not episode.ok:
        return {"error": f"{errors[-1].type}: {errors[-1].message}"}
    if not trained:
        return {"error": "no agent of the episode is trainable"}
    return {
        "reward": sum(trace.reward for trace in trained) / len(trained),
        "left_out": [trace.id for trace in episode.traces if not trace.agent.trainable],
    }


def _plain(message: Any) -> dict[str, str]:
    """As the model's template gets it before anything is played."""
    content = (
        message.content
        if isinstance(message.content, str)
        else "".join(getattr(part, "text", "") for part in message.content or ())
    )
    return {"role": message.role, "content": content}


if __name__ == "__main__":
    main()
