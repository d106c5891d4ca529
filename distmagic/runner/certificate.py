"""A certificate and its key for one delivery: by it the hosts of this delivery know each other."""

from __future__ import annotations

import datetime as dt

from distmagic.remote.wire.protocol import Secret

_LONG_AGO = dt.datetime(1970, 1, 2)  # noqa: DTZ001 - in UTC, as below
_FAR_AWAY = dt.datetime(2199, 1, 1)  # noqa: DTZ001


def one_time_secret() -> Secret:
    """Return a new certificate and its key.

    Its dates say nothing, because a host's clock may be wrong: it ends by being forgotten.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "distmagic")])
    builder = x509.CertificateBuilder(
        issuer_name=name,
        subject_name=name,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=_LONG_AGO,
        not_valid_after=_FAR_AWAY,
    )
    builder = builder.add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    )
    certificate = builder.sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Secret(
        certificate=certificate.public_bytes(pem).decode(), key=private.decode()
    )
