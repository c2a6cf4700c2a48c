"""The certificate that a peer's link server shows.

It proves nothing by itself: whoever dials pins its fingerprint, which stands in the peer's signed record.
"""

from __future__ import annotations

import os
import secrets
import ssl
import tempfile
from datetime import datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat
from cryptography.x509.oid import NameOID

__all__ = ["Certificate", "make_certificate"]

_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "p2pllm")])
"""The same for all: strangers see it."""

# Nobody checks these, and the true ones would show how wrong this machine's clock is.
_FROM, _UNTIL = datetime(2000, 1, 1), datetime(2100, 1, 1)


class Certificate:
    """A self-signed certificate; ``fingerprint`` is its SHA-256 (32 bytes)."""

    def __init__(self, fingerprint: bytes, context: ssl.SSLContext) -> None:
        self.fingerprint = fingerprint
        self._context = context

    def server_context(self) -> ssl.SSLContext:
        """Return what a server needs to show this certificate: TLS 1.3 or nothing."""
        return self._context


def make_certificate() -> Certificate:
    """Make a certificate with a new key (EC P-256). Blocks for some milliseconds: call it off the loop."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder(_NAME, _NAME, key.public_key(), x509.random_serial_number(), _FROM, _UNTIL)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, SHA256())
    )
    password = secrets.token_bytes(32).hex()
    hidden_key = key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password.encode())
    )
    context = _context(certificate.public_bytes(Encoding.PEM) + hidden_key, password)
    return Certificate(certificate.fingerprint(SHA256()), context)


def _context(pem: bytes, password: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nobody resumes: a link lasts, and its certificate as long as the process
    # The ssl module reads keys from files only. For others the file cannot be read, and even what is left of
    # it on the disk is of no use without the password.
    descriptor, path = tempfile.mkstemp(prefix="p2pllm-", suffix=".pem")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
        context.load_cert_chain(path, password=password)
    finally:
        os.unlink(path)
    return context
