"""A service that other machines reach: over TLS alone, by certificates of `titan-rl host`."""

import asyncio
import ssl
from contextlib import suppress

import httpx
import pytest

from titan_rl.cli import main
from titan_rl.config.command_line import EXIT_OK, EXIT_USER
from titan_rl.mesh.resources.certificates import server_certificate
from titan_rl.mesh.resources.listeners import http_server
from titan_rl.mesh.resources.listeners.http_server import HttpServer, listen
from titan_rl.service.command import Listener

_NAME = "localhost"


async def _app(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"served"})


def test_who_trusts_the_authority_is_served_and_nobody_without_tls(tmp_path):
    assert main(["host", "--make-certificates", str(tmp_path / "certs"), _NAME]) == EXIT_OK
    certificate = server_certificate(str(tmp_path / "certs"), _NAME, "--certificates")

    async def check() -> None:
        with listen(0, _NAME) as bound:
            listener = Listener(bound, _NAME, certificate)
            server = HttpServer(_app, bound, 1, certificate)
            async with httpx.AsyncClient(
                verify=ssl.create_default_context(cafile=tmp_path / "certs" / "ca.pem")
            ) as ours:
                assert (await ours.get(listener.address)).text == "served"
                with pytest.raises(httpx.HTTPError):
                    await ours.get(listener.address.replace("https", "http"))
            async with httpx.AsyncClient() as stranger:
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    await stranger.get(listener.address)
            await server.close()

    asyncio.run(check())


def test_who_says_nothing_is_not_waited_for_and_no_more_come_than_may(tmp_path, monkeypatch):
    monkeypatch.setattr(http_server, "_HEAD_SECONDS", 0.5)
    monkeypatch.setattr(http_server, "_MOST_CONNECTIONS", 3)
    assert main(["host", "--make-certificates", str(tmp_path / "certs"), _NAME]) == EXIT_OK
    certificate = server_certificate(str(tmp_path / "certs"), _NAME, "--certificates")
    trust = ssl.create_default_context(cafile=tmp_path / "certs" / "ca.pem")

    async def check() -> None:
        with listen(0, _NAME) as bound:
            server = HttpServer(_app, bound, 1, certificate)
            place = {"host": _NAME, "port": bound.getsockname()[1], "ssl": trust}
            async with httpx.AsyncClient(verify=trust) as client:
                address = Listener(bound, _NAME, certificate).address
                assert (await client.get(address)).text == "served"
                silent = [await asyncio.open_connection(**place) for _ in range(4)]
                silent[0][1].write(b"GET / HTTP/1.1\r\nHost:")
                for reader, writer in silent:
                    with suppress(ConnectionError):
                        assert await asyncio.wait_for(reader.read(), 10) == b""
                    writer.close()
                assert (await client.get(address)).text == "served"
            await server.close()

    asyncio.run(check())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--listen", _NAME], "belong together"),
        (["--port", "99999"], "cannot listen at port 99999: it is not from 0 to 65535"),
        (["--certificates", "certs"], "belong together"),
        (["--listen", _NAME, "--certificates", "nowhere"], "--certificates: nowhere/localhost.pem cannot be read"),
        (["--listen", "192.0.2.1", "--certificates", "certs"], "cannot listen at port 0 of '192.0.2.1'"),
    ],
)
def test_what_nobody_could_reach_is_one_line_before_anything_starts(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert main(["host", "--make-certificates", "certs", _NAME, "192.0.2.1"]) == EXIT_OK
    (tmp_path / "serve.toml").write_text("[lora]\nrank = 4\n")
    assert main(["serve", "serve.toml", *arguments]) == EXIT_USER
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1
