"""What people type, parsed."""

from __future__ import annotations

import pytest

from p2pllm.config import (
    format_bytes,
    parse_address,
    parse_addresses,
    parse_layers,
    parse_region,
    parse_size,
    parse_stretch,
)
from p2pllm.errors import UsageError


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("192.0.2.1:7600", ("192.0.2.1", 7600)),
        ("peer.example.org:1", ("peer.example.org", 1)),
        ("[2001:db8::1]:65535", ("2001:db8::1", 65535)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address
    assert parse_addresses(f"{text},a:2,{text}") == (address, ("a", 2))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x" * 256 + ":1",
        "a\nb:1",
        "host",
        ":1",
        "host:",
        "host:0",
        "host:65536",
        "host:x",
        "host:-1",
        "host:²",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match="host:port"):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        ("1024", 1024),
        ("8GiB", 2**33),
        ("8gib", 2**33),
        ("8Gi", 2**33),
        ("500MB", 5 * 10**8),
        ("1.5k", 1500),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "0", "9" * 400, "GiB", "-1", "8 XB", "8GiBs", "1e9", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="8GiB"):
        parse_size(text)


def test_layers() -> None:
    assert parse_layers("0:30") == (0, 30)


@pytest.mark.parametrize("text", ["", "3", "3:", ":3", "3:3", "4:3", "-1:3", "a:b"])
def test_what_is_no_layer_range(text: str) -> None:
    with pytest.raises(UsageError, match="start:end"):
        parse_layers(text)


@pytest.mark.parametrize("text", ["", "x" * 65, "é" * 33, "a\nb"])
def test_what_is_no_region(text: str) -> None:
    with pytest.raises(UsageError, match="region"):
        parse_region(text)
    assert parse_region("Zürich west") == "Zürich west"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (2048, "2 KiB"), (5 * 2**20, "5 MiB"), (1.5 * 2**40, "1536.0 GiB")],
)
def test_bytes_for_people(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_stretch() -> None:
    assert parse_stretch("1") == 1.0
    assert parse_stretch("2.5") == 2.5
    for bad in ("0.9", "101", "nan", "inf", "-2", "x", ""):
        with pytest.raises(UsageError, match="no number from 1 to 100"):
            parse_stretch(bad)
