"""Control sockets: signed messages between ranks, strangers are hung up on."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading

import pytest

from hpcflow.mpi import wire
from hpcflow.mpi.routes import Routes

SECRET = b"s" * 32


def pair() -> tuple[wire.Channel, wire.Channel]:
    a, b = socket.socketpair()
    # TCP_NODELAY does not exist on unix sockets: connect over loopback instead
    a.close(), b.close()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        box: list[wire.Channel] = []
        thread = threading.Thread(target=lambda: box.append(wire.accept(listener, SECRET, 0, {7})))
        thread.start()
        client = wire.connect(listener.getsockname(), SECRET, 7, 0)
        thread.join()
    return box[0], client


def read(channel: wire.Channel, count: int) -> list:
    got: list = []
    channel.sock.setblocking(True)
    while len(got) < count:
        got += channel.receive()
    channel.sock.setblocking(False)
    return got


def test_messages_arrive_in_order_and_whole() -> None:
    server, client = pair()
    sent = [("a", 1), b"x" * 3_000_000, None, {"k": [1, 2]}]
    box: list = []
    thread = threading.Thread(target=lambda: box.extend(read(server, len(sent))))
    thread.start()
    for message in sent:
        client.send(wire.encode(message))
    while not client.flush():
        pass
    thread.join()
    assert box == sent


class Boom:
    def __reduce__(self):
        return (pytest.fail, ("a stranger's bytes were unpickled",))


@pytest.mark.parametrize("hello", [b"", b"x" * 28, wire.HELLO.pack(wire.MAGIC, 7, b"y" * 16)])
def test_a_stranger_is_hung_up_on(hello: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        box: list[wire.Channel] = []
        thread = threading.Thread(target=lambda: box.append(wire.accept(listener, SECRET, 0, {7})))
        thread.start()
        stranger = socket.create_connection(listener.getsockname())
        stranger.sendall(hello + pickle.dumps(Boom()))
        with contextlib.suppress(OSError):  # the other side may have hung up already
            stranger.shutdown(socket.SHUT_WR)
        client = wire.connect(listener.getsockname(), SECRET, 7, 0)
        thread.join()
    assert box[0].peer == 7
    client.send(wire.encode("right"))
    assert read(box[0], 1) == ["right"]


def test_a_forged_or_repeated_message_is_not_unpickled() -> None:
    server, client = pair()
    body = pickle.dumps(Boom())
    client.sock.setblocking(True)
    client.sock.sendall(wire.FRAME.pack(len(body), b"z" * 16) + body)
    with pytest.raises(ConnectionError, match="wrong signature"):
        read(server, 1)
    server, client = pair()
    body = pickle.dumps("once")
    frame = wire.FRAME.pack(len(body), wire._signature(SECRET, 7, 0, 0, body)) + body
    client.sock.setblocking(True)
    client.sock.sendall(frame + frame)
    with pytest.raises(ConnectionError, match="wrong signature"):
        read(server, 2)


def test_a_rank_that_is_not_expected_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        box: list[wire.Channel] = []
        thread = threading.Thread(target=lambda: box.append(wire.accept(listener, SECRET, 0, {3})))
        thread.start()
        wire.connect(listener.getsockname(), SECRET, 9, 0)
        wire.connect(listener.getsockname(), SECRET, 3, 0)
        thread.join()
    assert box[0].peer == 3


def test_routes_fan_out_in_large_pools_and_reach_everybody_once() -> None:
    routes = Routes({"big": range(2, 42), "small": [42, 43]}, 45, fan_out=3)
    assert routes.parent(1) == 0 and routes.parent(44) == 0 and routes.parent(43) == 0
    assert routes.children(2) == [3, 4, 5]
    reached, frontier = [], [0]
    while frontier:
        rank = frontier.pop()
        children = routes.children_towards(rank, range(1, 45))
        reached += children
        frontier += children
    assert sorted(reached) == list(range(1, 45))
    assert routes.children_towards(0, [41]) == [2]
    assert max(len(routes.children(rank)) for rank in range(1, 45)) == 3
