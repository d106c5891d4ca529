"""Certificates with keys, by which two ends authenticate: the hosts of one delivery, or the nodes
of one job.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from typing import TYPE_CHECKING, Any

from distmagic.remote.wire.protocol import Secret

if TYPE_CHECKING:
    from cryptography import x509

_LONG_AGO = dt.datetime(1970, 1, 2)  # noqa: DTZ001 - in UTC, as below
_FAR_AWAY = dt.datetime(2199, 1, 1)  # noqa: DTZ001
# Cost of scrypt: 32 MiB and about 100 ms for each guess of a weak secret.
_SCRYPT_N, _SCRYPT_R, _SCRYPT_P = 2**15, 8, 1


def one_time_secret() -> Secret:
    """Return a new certificate and its key.

    Its dates mean nothing, because a host's clock may be wrong: it is valid until it is forgotten.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(key.public_key(), x509.random_serial_number())
    return _pem(builder.sign(key, hashes.SHA256()), key)


def shared_secret(text: str, job: str) -> Secret:
    """Return a certificate and key, derived from a text that several nodes share and from their
    job's name.

    Every node derives the same ones: Ed25519 signs without randomness, and all else in the
    certificate is fixed.
    """
    from cryptography.hazmat.primitives.asymmetric import ed25519

    seed = hashlib.scrypt(
        text.encode(), salt=f"distmagic nodes of {job}".encode(), n=_SCRYPT_N, r=_SCRYPT_R, p=_SCRYPT_P,
        maxmem=2**26, dklen=32,
    )  # fmt: skip
    key = ed25519.Ed25519PrivateKey.from_private_bytes(seed)
    return _pem(_builder(key.public_key(), 1).sign(key, None), key)


def _builder(public_key: Any, serial: int) -> x509.CertificateBuilder:
    """Return an unsigned certificate that is its own authority."""
    from cryptography import x509

    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "distmagic")])
    builder = x509.CertificateBuilder(
        issuer_name=name,
        subject_name=name,
        public_key=public_key,
        serial_number=serial,
        not_valid_before=_LONG_AGO,
        not_valid_after=_FAR_AWAY,
    )
    return builder.add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    )


def _pem(certificate: x509.Certificate, key: Any) -> Secret:
    from cryptography.hazmat.primitives import serialization

    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Secret(
        certificate=certificate.public_bytes(pem).decode(), key=private.decode()
    )
