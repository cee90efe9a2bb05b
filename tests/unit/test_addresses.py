"""Addresses are parsed and resolved by us; what ZeroMQ would take silently is refused."""

import asyncio
import socket
from typing import Any

import pytest

from epd.protocol.errors import ConfigError, PeerUnreachable
from epd.runtime.addresses import Address, is_wildcard, parse_address, resolve, resolve_to_bind


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://127.0.0.1:5000", Address("127.0.0.1", 5000)),
        ("tcp://host-1.example:65535", Address("host-1.example", 65535)),
        ("tcp://[::1]:1", Address("::1", 1)),
    ],
)
def test_good_addresses_are_parsed_and_written_alike(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:5000",
        "udp://127.0.0.1:5000",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:",
        "tcp://:5000",
        "tcp://*:5000",
        "tcp://127.0.0.1:*",
        "tcp://127.0.0.1:70000",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:12x",
        "tcp://127.0.0.1:+12",
        "tcp://127.0.0.1:1_2",
        "tcp://127.0.0.1:٣",
        "tcp://127.0.0.1:-1",
        "tcp://127.0.0.1:0000001",
        "tcp://::1:5000",
        "tcp://[::1:5000",
        "tcp://[127.0.0.1]:5000",
        "tcp://[host]:5000",
        "tcp://[ab:cd]:5000",
        "tcp://a b:5000",
        "tcp://a;127.0.0.1:5000",
        "tcp://user@host:5000",
        "tcp://host/path:5000",
        "tcp://bücher:5000",
    ],
)
def test_anything_else_is_refused_naming_key_value_and_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(text, key="encoders")
    message = str(caught.value)
    assert message.startswith(f"encoders: {text!r} given, allowed is tcp://HOST:PORT")


def test_port_0_is_to_bind_and_not_to_dial() -> None:
    assert parse_address("tcp://127.0.0.1:0", to_bind=True) == Address("127.0.0.1", 0)
    with pytest.raises(ConfigError, match="a port of 1 to 65535"):
        parse_address("tcp://127.0.0.1:0")


def test_wildcards_are_known_in_every_spelling() -> None:
    wildcards = [str(socket.inet_ntoa(bytes(4))), "::", "0:0:0:0:0:0:0:0"]
    assert all(map(is_wildcard, wildcards))
    assert not any(map(is_wildcard, ["127.0.0.1", "::1", "localhost"]))


async def test_numbers_are_not_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody(*_: Any, **__: Any) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", nobody)
    assert await resolve(Address("127.0.0.1", 5)) == [Address("127.0.0.1", 5)]
    assert await resolve(Address("::1", 5)) == [Address("::1", 5)]


async def test_a_name_gives_every_number_once_in_the_resolvers_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        assert (host, port) == ("a.name", 5)
        return [(0, 0, 0, "", (number, port)) for number in ("::1", "127.0.0.2", "::1", "127.0.0.1")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", answer)
    found = await resolve(Address("a.name", 5))
    assert found == [Address("::1", 5), Address("127.0.0.2", 5), Address("127.0.0.1", 5)]


@pytest.mark.parametrize("error", [socket.gaierror(-2, "Name or service not known"), UnicodeError("label")])
async def test_an_unresolvable_name_is_a_typed_error_with_the_name(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", fail)
    with pytest.raises(PeerUnreachable, match=r"no\.such"):
        await resolve(Address("no.such", 5))


def test_a_name_to_bind_that_does_not_resolve_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="media_listen"):
        resolve_to_bind(Address("a" * 70, 5), key="media_listen")
    assert resolve_to_bind(Address("127.0.0.1", 5)) == Address("127.0.0.1", 5)
