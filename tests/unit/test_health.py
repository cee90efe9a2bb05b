"""Probes over real HTTP: the words, the bounds, and that a loop that stands still is seen."""

import http.client
import socket
from collections.abc import Iterator

import pytest

from epd.observe.health import STALLED_AFTER_S, Health
from epd.observe.http import MAX_CONNECTIONS, MAX_REQUEST_NBYTES, HttpServer, Page, text_page
from epd.protocol.errors import ConfigError


class Clock:
    def __init__(self) -> None:
        self.seconds = 5.0

    def __call__(self) -> float:
        return self.seconds


def test_a_node_is_loading_then_ready_while_it_can_serve_then_draining() -> None:
    serving: list[bool] = []
    health = Health(lambda: bool(serving), now_s=Clock())
    words = [health.word]
    serving.append(True)
    words.append(health.word)
    health.started = True
    words.append(health.word)
    serving.clear()
    words.append(health.word)
    serving.append(True)
    health.draining = True
    words.append(health.word)
    health.failed = True
    words.append(health.word)
    assert words == ["loading", "loading", "ready", "loading", "draining", "unhealthy"]
    assert not health.is_alive


@pytest.fixture
def server() -> Iterator[HttpServer]:
    def broken() -> Page:
        raise ValueError("a bug")

    serving = HttpServer("127.0.0.1", 0, {"/healthz": lambda: text_page(200, "ready"), "/broken": broken})
    yield serving
    serving.close()


def port_of(server: HttpServer) -> int:
    return int(server.url.rpartition(":")[2])


def ask(server: HttpServer, method: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=20)
    try:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def raw(server: HttpServer, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=20) as connection:
        connection.sendall(data)
        return connection.recv(4096)


def test_a_loop_that_stands_still_is_unhealthy_until_it_turns_again() -> None:
    clock = Clock()
    health = Health(lambda: True, now_s=clock)
    health.started = True

    def healthz() -> Page:
        return text_page(200 if health.is_alive else 503, health.word)

    server = HttpServer("127.0.0.1", 0, {"/healthz": healthz})
    try:
        clock.seconds += STALLED_AFTER_S
        assert ask(server, "GET", "/healthz") == (200, "ready\n")
        clock.seconds += 0.1
        assert ask(server, "GET", "/healthz") == (503, "unhealthy\n")
        health.beat()
        assert ask(server, "GET", "/healthz") == (200, "ready\n")
    finally:
        server.close()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "PATCH", "get"])
def test_nothing_but_get_is_answered(server: HttpServer, method: str) -> None:
    assert ask(server, method, "/healthz")[0] == 405


def test_other_paths_and_other_protocols_are_refused(server: HttpServer) -> None:
    assert ask(server, "GET", "/healthz?verbose=1") == (200, "ready\n")
    assert ask(server, "GET", "/etc/passwd")[0] == 404
    assert ask(server, "GET", "/broken")[0] == 500
    assert raw(server, b"hello\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert raw(server, b"\x16\x03\x01\x02\x00\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert ask(server, "GET", "/healthz") == (200, "ready\n")


def test_a_request_without_end_is_refused_at_its_bound(server: HttpServer) -> None:
    endless = {"X": "a" * (2 * MAX_REQUEST_NBYTES)}
    assert ask(server, "GET", "/healthz", endless)[0] == 431


def closed_by_peer(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_connections_that_say_nothing_do_not_keep_probes_out(server: HttpServer) -> None:
    silent = [
        socket.create_connection(("127.0.0.1", port_of(server)), timeout=20)
        for _ in range(3 * MAX_CONNECTIONS)
    ]
    try:
        assert ask(server, "GET", "/healthz") == (200, "ready\n")
        assert len(server._connections) <= MAX_CONNECTIONS
        assert closed_by_peer(silent[0])  # the oldest made room
    finally:
        for connection in silent:
            connection.close()


def test_a_port_that_is_taken_is_named_with_its_key(server: HttpServer) -> None:
    with pytest.raises(ConfigError) as caught:
        HttpServer("127.0.0.1", port_of(server), {})
    assert caught.value.message.startswith(f"metrics_port: cannot listen on 127.0.0.1 port {port_of(server)}")


def test_ipv6_and_names_can_be_listened_on() -> None:
    for host in ("::1", "localhost"):
        server = HttpServer(host, 0, {"/": lambda: text_page(200, "here")})
        server.close()
        assert server.url.startswith("http://[::1]:" if host == "::1" else "http://localhost:")
    with pytest.raises(ConfigError):
        HttpServer("no-such-host.invalid", 0, {})
