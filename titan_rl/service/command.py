"""``titan-rl serve CONFIG``: training and sampling for clients of the Tinker API, until Ctrl-C.

The mesh is a run's: a trainer, whose adapters are the clients', and generators. Only this machine reaches the server,
unless it has a certificate, and only with the key that it prints.
"""

import argparse
import asyncio
import json
import secrets
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan_rl.config.command_line import EXIT_FAULT, EXIT_OK
from titan_rl.config.io.printable import say
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import Config
from titan_rl.mesh.forking.forking import servers_started_early
from titan_rl.mesh.resources.certificates import server_certificate
from titan_rl.mesh.resources.imports import collector_paused
from titan_rl.mesh.resources.listeners.http_server import LOOPBACK, Certificate, HttpServer, listen
from titan_rl.mesh.resources.open_files import raise_open_files

if TYPE_CHECKING:  # its imports take seconds, which a mistake in the TOML need not wait for
    from titan_rl.service.session import ServiceSession

_GRACE_SECONDS = 2
_KINDS = ("trainer", "generator")
CHECKS = ("settings together", "algorithm", "model", "adapted head", "decoding", "transport", "placement", "hosts")
"""Of those of a run, the ones that do not ask what it trains on."""


@dataclass(frozen=True)
class Listener:
    """Where a service is reached."""

    socket: socket.socket
    name: str = LOOPBACK
    certificate: Certificate | None = None

    @property
    def address(self) -> str:
        scheme = "https" if self.certificate else "http"
        return f"{scheme}://{self.name}:{self.socket.getsockname()[1]}"


def serve(options: argparse.Namespace, overrides: dict[str, dict[str, Any]]) -> int:
    """Serve until a signal; the exit code. Errors: ConfigError before anything starts."""
    config = load_config(options.file, overrides)
    _check(config)
    name, certificate = _name_and_certificate(options)
    raise_open_files()
    with listen(options.port, name) as bound, servers_started_early(config, _KINDS):
        listener = Listener(bound, name, certificate)
        return asyncio.run(_serve(config, listener, options.name, as_json=options.json))


def _name_and_certificate(options: argparse.Namespace) -> tuple[str, Certificate | None]:
    """Errors: ConfigError."""
    if not options.listen and not options.certificates:
        return LOOPBACK, None
    if not options.listen or not options.certificates:
        raise ConfigError(
            "--listen NAME and --certificates DIR belong together: what other machines reach is served over TLS alone"
        )
    return options.listen, server_certificate(options.certificates, options.listen, "--certificates")


def _check(config: Config) -> None:
    """Errors: ConfigError for what no service can have."""
    if not config.lora.rank:
        raise ConfigError("serve trains adapters of one base model: set [lora] rank, such as 32")
    if config.lora.adapter:
        raise ConfigError("lora.adapter: clients begin with adapters of their own: leave it out")
    if config.rollout.temperature != 1.0:
        raise ConfigError("rollout.temperature: clients choose their own: leave it out")
    if config.algorithm.routing == "replay":
        raise ConfigError("algorithm.routing = 'replay': what clients train on has no routed experts; leave it out")
    if config.generator.is_quantized:
        setting = f"generator.quantization = {config.generator.quantization!r}"
        raise ConfigError(f"{setting}: clients' losses do not weigh what FP8 engines sample; leave it out")
    if config.drafter.path:
        raise ConfigError(
            f"drafter.path = {config.drafter.path!r}: no draft model learns what clients train; give it as "
            f"generator.speculative.model"
        )
    if config.drafter.train_mtp:
        raise ConfigError("drafter.train_mtp = true: no layer learns what clients train; leave it out")
    if config.hosts.is_on:
        raise ConfigError("serve is for this machine: leave [hosts] out")


async def _serve(config: Config, listener: Listener, name: str | None, *, as_json: bool) -> int:
    with collector_paused():
        from titan_rl.service.session import ServiceSession

    key = f"tml-{secrets.token_urlsafe(32)}"
    session = ServiceSession.open(config, name, checks=CHECKS)
    try:
        await session.start()
        _announce(session, listener, key, as_json=as_json)
        await _until_stopped(session, listener, key)
    finally:
        await session.close()
    return EXIT_FAULT if session.fault else EXIT_OK


def _announce(session: "ServiceSession", listener: Listener, key: str, *, as_json: bool) -> None:
    if as_json:
        say(json.dumps({"base_url": listener.address, "api_key": key, "base_model": session.model.name}))
        return
    say(f"export TINKER_BASE_URL={listener.address}")
    say(f"export TINKER_API_KEY={key}")
    who = "Clients need SSL_CERT_FILE=ca.pem" if listener.certificate else "Only this machine reaches the server"
    say(f"The base model is {session.model.name!r}. {who}. Ctrl-C ends it.")


async def _until_stopped(session: "ServiceSession", listener: Listener, key: str) -> None:
    """Serve until a signal, or until the session has a fault."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    session.on_fault = ended.set
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    try:
        async with serving(session, listener, key):
            await ended.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@asynccontextmanager
async def serving(session: "ServiceSession", listener: Listener, key: str) -> AsyncIterator[None]:
    """Answer requests inside the context. ``key``: that each must have."""
    from titan_rl.service.application import application

    app = application(session.service, key)
    server = HttpServer(app, listener.socket, _GRACE_SECONDS, listener.certificate)
    try:
        yield
    finally:
        await server.close()
