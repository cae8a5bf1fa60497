"""A server that answers as SandboxFusion does."""

import asyncio
import json
import subprocess
import sys
import tempfile

from aiohttp import web
from fake_servers import serving

from titan_rl.environments.sandbox.program import Limits, Program
from titan_rl.environments.sandbox.remote import RemoteSandbox, remote_config

LIMITS = Limits(seconds=2.0)


class FakeFusion:
    """As SandboxFusion answers, without its walls: what is run here is the tests' own. ``on``: what answers in place of
    the first calls; None: that one is run."""

    def __init__(self, *on, python=sys.executable):
        self.on, self.python, self.bodies, self.headers = list(on), python, [], []
        self.app = web.Application()
        self.app.router.add_post("/run_code", self.serve)

    async def serve(self, request):
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.headers.append(request.headers)
        if self.on and (answer := self.on.pop(0)) is not None:
            return await answer(request)
        return web.json_response(await asyncio.to_thread(self.run, body))

    def run(self, body):
        assert body["language"] == "python" and body["run_timeout"] > LIMITS.seconds
        with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
            file.write(body["code"])
            file.flush()
            try:
                done = subprocess.run(
                    [self.python, file.name],
                    input=body["stdin"],
                    capture_output=True,
                    text=True,
                    timeout=body["run_timeout"],
                )
            except subprocess.TimeoutExpired:
                return {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "stdout": "", "stderr": ""}}
        ran = dict(return_code=done.returncode, stdout=done.stdout, stderr=done.stderr, execution_time=0.1)
        is_good = done.returncode == 0
        status = ("Success", "Finished") if is_good else ("Failed", "Error")
        return {"status": status[0], "run_result": {"status": status[1]} | ran}


def asked(fake, work, **settings):
    """What ``work`` makes of a sandbox at that server."""
    with serving(fake.app) as port:
        sandbox = RemoteSandbox(remote_config({"url": f"http://127.0.0.1:{port}", "patience": 4.0} | settings))
        return asyncio.run(work(sandbox))


def ran(source, stdin="", limits=LIMITS, fake=None, **settings):
    return asked(fake or FakeFusion(), lambda sandbox: sandbox.run(Program(source, stdin, limits=limits)), **settings)
