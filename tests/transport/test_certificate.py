"""The certificate: what it shows, and that its key leaves nothing behind."""

from __future__ import annotations

import asyncio
import hashlib
import os
import ssl
import stat
import tempfile
from pathlib import Path

import pytest
from aiohttp import web

from p2pllm.transport import make_certificate, serve


def trusting(**limits):
    """A client's context that takes any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    for name, value in limits.items():
        setattr(context, name, value)
    return context


async def test_the_fingerprint_is_that_of_what_a_server_shows():
    certificate = make_certificate()
    server = await serve(web.Application(), ["127.0.0.1"], 0, tls=certificate.server_context())
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting())
    shown = writer.get_extra_info("ssl_object")
    assert hashlib.sha256(shown.getpeercert(binary_form=True)).digest() == certificate.fingerprint
    assert shown.version() == "TLSv1.3"
    writer.close()
    await server.close()


async def test_older_encryption_is_refused():
    server = await serve(web.Application(), ["127.0.0.1"], 0, tls=make_certificate().server_context())
    old = trusting(maximum_version=ssl.TLSVersion.TLSv1_2)
    with pytest.raises(OSError):  # noqa: PT011  the loops differ in what they make of it
        await asyncio.open_connection("127.0.0.1", server.port, ssl=old)
    await server.close()


def test_every_certificate_is_another():
    assert make_certificate().fingerprint != make_certificate().fingerprint


def test_the_key_is_on_the_disk_for_a_moment_for_us_alone_and_sealed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = []

    load = ssl.SSLContext.load_cert_chain

    def watched(context, path, password):
        seen.append((stat.S_IMODE(os.stat(path).st_mode), Path(path).read_text()))
        load(context, path, password=password)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", watched)
    make_certificate()
    ((mode, text),) = seen
    assert mode == 0o600
    assert "BEGIN ENCRYPTED PRIVATE KEY" in text
    assert "BEGIN PRIVATE KEY" not in text
    assert list(tmp_path.iterdir()) == []
