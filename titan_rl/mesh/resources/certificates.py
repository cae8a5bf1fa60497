"""Certificates of a run: an authority of its own, and for each host a certificate that it signed.

Whoever holds a certificate of the authority may control everything, so a run has an authority of its own, and its key
is needed for nothing once the certificates are made. Monarch reads HYPERACTOR_TLS_* when its library is loaded, so they
must be in the environment before that.
"""

import atexit
import datetime
import ipaddress
import os
import socket
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

from titan_rl.compat.monarch.library import is_loaded
from titan_rl.config.load import ConfigError
from titan_rl.config.sections.hosts import HostsConfig
from titan_rl.mesh.resources.scratch import make_scratch, remove_scratch

if TYPE_CHECKING:  # it takes a moment, and most runs have one host
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.types import (
        CertificateIssuerPrivateKeyTypes,
        CertificatePublicKeyTypes,
    )

VARIABLES = {
    "HYPERACTOR_TLS_CERT": "{name}.pem",
    "HYPERACTOR_TLS_KEY": "{name}.key",
    "HYPERACTOR_TLS_CA": "ca.pem",
}
_DAYS = 30


def use_certificates(folder: str, name: str, environment: MutableMapping[str, str], user: str) -> None:
    """Of a machine of that name, from now on in this process and in those that it starts; without a folder, those that
    the environment names. ``said``: who asked, for messages. Errors: ConfigError."""
    paths = {key: str(Path(folder, file.format(name=name)).absolute()) for key, file in VARIABLES.items()}
    if not folder:
        paths = {key: environment.get(key, "") for key in VARIABLES}
    if missing := [key for key, path in paths.items() if not path]:
        raise ConfigError(
            f"{user} needs certificates, and {missing[0]} is not set: make them by `titan-rl host --make-certificates "
            f"FOLDER NAMES`, and give their folder"
        )
    _check_files(paths.values(), paths["HYPERACTOR_TLS_KEY"], user)
    is_new = any(environment.get(key) != path for key, path in paths.items())
    if is_new and environment is os.environ and is_loaded():
        raise ConfigError(
            f"{user}: Monarch is loaded already: set HYPERACTOR_TLS_CERT, _KEY and _CA before Python starts"
        )
    environment.update(paths)


def _check_files(paths: Iterable[str], key: str, user: str) -> None:
    """Errors: ConfigError for one that cannot be read, and for a key that others can read."""
    for path in paths:
        if not os.access(path, os.R_OK):
            raise ConfigError(f"{user}: {path} cannot be read: `titan-rl host --make-certificates` makes it")
    if Path(key).stat().st_mode & 0o077:
        raise ConfigError(f"{user}: {key} can be read by other users: chmod 600 it")


def server_certificate(folder: str, name: str, user: str) -> tuple[str, str]:
    """Certificate and key of a server at that name, made where the folder has its authority's key. ``user``: who asks,
    for messages. Errors: ConfigError."""
    own = complete(folder, name)
    certificate, key = str(Path(own, f"{name}.pem")), str(Path(own, f"{name}.key"))
    _check_files((certificate, key), key, user)
    return certificate, key


def certify(hosts: HostsConfig) -> None:
    """Use certificates as the controller of a run over these hosts. Errors: ConfigError."""
    if not hosts.insecure:
        name = hosts.controller or socket.gethostname()
        use_certificates(complete(hosts.certificates, name), name, os.environ, "[hosts]")


def complete(folder: str, name: str, *, aside: bool = False) -> str:
    """Where a machine of that name finds its own: ``folder``, unless that has none for it and the authority's key. Then
    they are made: there, or (``aside``) in a folder that goes with this process. Errors: ConfigError."""
    there, files = Path(folder), [file.format(name=name) for file in VARIABLES.values()]
    if not folder or not (there / "ca.key").exists() or all((there / file).exists() for file in files):
        return folder
    own = there
    if aside:
        atexit.register(remove_scratch, own := make_scratch())
        for file in ("ca.pem", "ca.key"):
            _copy_private(there / file, own / file)
    make_certificates(own, [name])
    if aside:
        (own / "ca.key").unlink()  # nobody needs it there any more
    return str(own)


def _copy_private(file: Path, to: Path) -> None:
    try:
        with open(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as copy:
            copy.write(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None


def make_certificates(folder: Path, names: Iterable[str]) -> list[Path]:
    """``ca.pem``, and ``NAME.pem`` and ``NAME.key`` of each host; keys for their user alone. A folder that has an
    authority keeps it. What was written. Errors: ConfigError."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    called = {name: _alternative(name) for name in names}
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        key, authority = _authority(folder)
        written = [folder / "ca.pem"]
        for name, alternative in called.items():
            own = _new_key()
            purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            certificate = (
                _begun(name, authority.subject, own.public_key())
                .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
                .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
                .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            )
            written += _write(folder, name, own, _signed(certificate, key))
        return written
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}; give another folder") from None


def _alternative(name: str) -> "x509.GeneralName":
    from cryptography import x509

    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name))
    if "/" in name or not name.isascii() or not name.strip("."):
        raise ConfigError(f"{name!r} is no name of a host")
    return x509.DNSName(name)


def _authority(folder: Path) -> "tuple[CertificateIssuerPrivateKeyTypes, x509.Certificate]":
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    if (folder / "ca.key").exists():
        key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
        return cast("CertificateIssuerPrivateKeyTypes", key), x509.load_pem_x509_certificate(
            (folder / "ca.pem").read_bytes()
        )
    key = _new_key()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "titan_rl: one run's hosts")])
    begun, only = _begun(None, name, key.public_key()), x509.BasicConstraints(ca=True, path_length=0)
    certificate = _signed(begun.add_extension(only, critical=True), key)
    _write(folder, "ca", key, certificate)
    return key, certificate


def _begun(name: str | None, issuer: "x509.Name", public_key: "CertificatePublicKeyTypes") -> "x509.CertificateBuilder":
    from cryptography import x509

    now, hour = datetime.datetime.now(datetime.UTC), datetime.timedelta(hours=1)
    subject = issuer if name is None else x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])])
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public_key)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - hour)  # clocks differ
    return builder.not_valid_after(now + datetime.timedelta(days=_DAYS))


def _signed(builder: "x509.CertificateBuilder", key: "CertificateIssuerPrivateKeyTypes") -> "x509.Certificate":
    from cryptography.hazmat.primitives import hashes

    return builder.sign(key, hashes.SHA256())


def _new_key() -> "EllipticCurvePrivateKey":
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _write(
    folder: Path, name: str, key: "CertificateIssuerPrivateKeyTypes", certificate: "x509.Certificate"
) -> list[Path]:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    pem, private = folder / f"{name}.pem", folder / f"{name}.key"
    with open(os.open(private, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    pem.write_bytes(certificate.public_bytes(Encoding.PEM))
    return [pem, private]
