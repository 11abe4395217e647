"""Control messages over sockets between the ranks of one world.

Nodes are shared with other users, so a listening port can be reached by strangers. Every launch draws a secret,
spreads it through MPI, and nothing that is not signed with it is ever unpickled: the first bytes of a connection
prove the secret, and each message carries a keyed hash over (sender, receiver, sequence number, body).
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import socket
import struct
import threading
from typing import Any

HELLO = struct.Struct("<8si16s")
FRAME = struct.Struct("<I16s")
MAGIC = b"hpcflow1"
HANDSHAKE_SECONDS = 5.0
READ_BYTES = 1 << 20


def _signature(secret: bytes, sender: int, receiver: int, sequence: int, body: bytes) -> bytes:
    person = struct.pack("<iiq", sender, receiver, sequence)
    return hashlib.blake2b(body, key=secret, digest_size=16, person=person).digest()


def encode(message: Any) -> bytes:
    """A message as it travels; one encoding serves any number of channels."""
    return pickle.dumps(message, 5)


class Channel:
    """A signed, ordered, non-blocking message stream to one other rank. Two threads may send."""

    def __init__(self, sock: socket.socket, secret: bytes, me: int, peer: int) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self.sock, self.secret, self.me, self.peer = sock, secret, me, peer
        self.bytes_sent = 0
        self._unsent, self._unread = bytearray(), bytearray()
        self._sent, self._received = 0, 0
        self._lock = threading.Lock()

    def send(self, body: bytes) -> bool:
        """Queue a message made by `encode` and send what the socket takes.

        False: call `flush` when it is writable again.
        """
        with self._lock:
            signature = _signature(self.secret, self.me, self.peer, self._sent, body)
            self._sent += 1
            self._unsent += FRAME.pack(len(body), signature) + body
            self.bytes_sent += FRAME.size + len(body)
            return self._flush()

    def flush(self) -> bool:
        """True when nothing is left to send. A closed peer counts as sent: reading reports it."""
        with self._lock:
            return self._flush()

    def _flush(self) -> bool:
        try:
            while self._unsent:
                del self._unsent[: self.sock.send(self._unsent)]
        except BlockingIOError:
            return False
        except OSError:
            self._unsent.clear()
        return True

    def receive(self) -> list[Any]:
        """All complete messages that have arrived. ConnectionError at the end of the stream."""
        try:
            data = self.sock.recv(READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionError("closed")
        self._unread += data
        messages = []
        while len(self._unread) >= FRAME.size:
            length, signature = FRAME.unpack_from(self._unread)
            if len(self._unread) < FRAME.size + length:
                break
            body = bytes(self._unread[FRAME.size : FRAME.size + length])
            del self._unread[: FRAME.size + length]
            expected = _signature(self.secret, self.peer, self.me, self._received, body)
            if not hmac.compare_digest(signature, expected):
                raise ConnectionError(
                    f"a message that claims to come from rank {self.peer} has a wrong signature"
                )
            self._received += 1
            messages.append(pickle.loads(body))
        return messages

    def close(self) -> None:
        self.sock.close()


def connect(address: tuple[str, int], secret: bytes, me: int, peer: int) -> Channel:
    """Connect to a listening rank and prove the secret."""
    sock = socket.create_connection(address)
    sock.sendall(HELLO.pack(MAGIC, me, _signature(secret, me, peer, -1, MAGIC)))
    return Channel(sock, secret, me, peer)


def accept(listener: socket.socket, secret: bytes, me: int, expected: set[int]) -> Channel:
    """The next connection from one of the ``expected`` ranks; strangers are hung up on."""
    while True:
        sock, _ = listener.accept()
        sock.settimeout(HANDSHAKE_SECONDS)
        try:
            magic, peer, signature = HELLO.unpack(sock.recv(HELLO.size, socket.MSG_WAITALL))
        except (OSError, struct.error):
            sock.close()
            continue
        proof = _signature(secret, peer, me, -1, MAGIC)
        if magic == MAGIC and peer in expected and hmac.compare_digest(signature, proof):
            return Channel(sock, secret, me, peer)
        sock.close()
