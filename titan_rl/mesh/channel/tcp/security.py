"""Who may ask for blocks: inside a run that has certificates, their holders; always, who knows the server's token.

The certificates are those of Monarch's own ports (HYPERACTOR_TLS_CERT, _KEY, _CA: files). Both ends must show one of
the run's CA; names are not compared, since a CA is made for one run. Without certificates bytes travel in the clear.
"""

import os
import socket
import ssl
from functools import cache

from titan_rl.mesh.resources.certificates import VARIABLES

_VARIABLES = tuple(VARIABLES)


def certificate_files() -> tuple[str, str, str] | None:
    """Certificate, key and CA of this process; None where it has none. Errors: ValueError if only some are named."""
    certificate, key, authority = files = [os.environ.get(name, "") for name in _VARIABLES]
    if any(files) and not all(files):
        missing = [name for name, value in zip(_VARIABLES, files, strict=True) if not value]
        raise ValueError(f"TLS needs {', '.join(_VARIABLES)}: {', '.join(missing)} is not set")
    return (certificate, key, authority) if all(files) else None


@cache
def _context(files: tuple[str, str, str], server_side: bool) -> ssl.SSLContext:
    certificate, key, authority = files
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(authority)
    return context


def accepted(connection: socket.socket, files: tuple[str, str, str] | None) -> socket.socket:
    """A server's end of a new connection, inside TLS if there are ``files``; its handshake ends within the connection's
    timeout. Errors: OSError (ssl.SSLError among them)."""
    return connection if files is None else _context(files, True).wrap_socket(connection, server_side=True)


def connected(connection: socket.socket, is_tls: bool) -> socket.socket:
    """A client's end, likewise. Errors: OSError; ConnectionError if TLS is wanted and this process has no
    certificate."""
    context = client_context(is_tls)
    return connection if context is None else context.wrap_socket(connection)


def client_context(is_tls: bool) -> ssl.SSLContext | None:
    """What a client speaks by; None: in the clear. Errors: as above."""
    if not is_tls:
        return None
    if (files := certificate_files()) is None:
        raise ConnectionError(f"the other end speaks TLS, and {_VARIABLES[0]} is not set here")
    return _context(files, False)
