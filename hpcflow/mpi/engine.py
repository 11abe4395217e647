"""The communication loop of one rank: the only place where MPI is called and the only place that sleeps.

Control messages travel over signed sockets, tensors over MPI. While nothing is in flight in MPI, the loop does not poll
MPI: it sleeps in epoll on its sockets, an eventfd (its own main thread), a signal socket and a UDP *bell*. A sender
rings the receiver's bell after it has posted an MPI send. A ring is only a hint (it carries nothing, may overtake its
message or get lost): it makes the receiver look at MPI for `LOOK_SECONDS`, and while something is expected the receiver
looks every `MISSED_BELL_SECONDS` anyway.

In a worker the loop runs in a thread of its own (the communication thread), so that transfers, heartbeats and stop
flags progress while the main thread computes. MPI is initialised in that thread, which makes it MPI's main thread:
FUNNELED is enough, and no other thread may call MPI. In the controller the loop runs inside its blocking calls.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False  # a rank that raises must not sit in MPI_Finalize
from mpi4py import MPI  # noqa: E402

from hpcflow.mpi import preflight, wire  # noqa: E402
from hpcflow.mpi.messages import Lost, Signal, Spread  # noqa: E402
from hpcflow.mpi.routes import Routes  # noqa: E402

LOOK_SECONDS = 0.002
MISSED_BELL_SECONDS = 0.02
HEARTBEAT_SECONDS = 1.0
YIELDS_BEFORE_SLEEP = 50
NAP_SECONDS = (20e-6, 250e-6, 2e-3)  # first, longest while fresh, longest after a second without progress
EPOLL_RESOLUTION = 2e-3  # epoll counts in milliseconds; below this, select on the epoll descriptor


def own_address(hosts: list[str]) -> str:
    """The address other ranks of these hosts can reach this one at: loopback when there is only one host."""
    if len(set(hosts)) == 1:
        return "127.0.0.1"
    if configured := os.environ.get("HPCFLOW_HOST"):
        return configured
    for *_, (address, _) in socket.getaddrinfo(
        socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM
    ):
        if not address.startswith("127."):
            return address
    raise ValueError(
        f"host {socket.gethostname()} resolves only to loopback addresses; "
        "set HPCFLOW_HOST to an address that the other nodes reach, e.g. HPCFLOW_HOST=10.0.0.7"
    )


def _forget_shared_memory() -> None:
    """Remove the names of MPI's shared memory once every rank of the node has mapped it: a world that is killed
    would leave it behind, and with it the node's memory."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    for name in {line.split(maxsplit=5)[-1] for line in maps if "/dev/shm/mpich_shm_" in line}:
        Path(name).unlink(missing_ok=True)


class Engine:
    """One rank's sockets, bell and MPI requests. ``deliver(message)`` is called for each control message."""

    def __init__(self, spread: Spread | None, signals: socket.socket) -> None:
        MPI.Init_thread(MPI.THREAD_FUNNELED)
        world = MPI.COMM_WORLD
        preflight.check_world(world.size)
        world.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size = world.rank, world.size
        self.spread: Spread = world.bcast(spread, 0)
        self.data = world.Dup()
        self.tags = world.Get_attr(MPI.TAG_UB) // 2 - 1
        self.groups = self._communicators(world)
        self.routes = Routes(self.spread.pools, self.size)
        self.deliver: Callable[[Any], None] = lambda message: None
        self.stopping = False
        self._requests: list[tuple[list[MPI.Request], Any, Callable[[], None] | None]] = []
        self._channels: dict[int, wire.Channel] = {}
        self._peers: dict[int, int] = {}
        self._signals = signals
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._bell = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._bell.setblocking(False)
        self._poll = select.epoll()
        self._look_until = 0.0
        self._idle_turns, self._last_progress = 0, time.perf_counter()
        self.progress = False
        self._connect(world)
        for descriptor in (self._wake, self._bell.fileno(), signals.fileno()):
            self._poll.register(descriptor, select.EPOLLIN)

    def _communicators(self, world: MPI.Intracomm) -> dict[str, MPI.Intracomm]:
        """A sub-communicator for each worker group this rank belongs to, ranked in the group's own order."""
        found = {}
        for tag, (name, ranks) in enumerate(sorted(self.spread.groups.items())):
            if self.rank in ranks:
                found[name] = world.Create_group(world.group.Incl(list(ranks)), tag)
        return found

    def _connect(self, world: MPI.Intracomm) -> None:
        """Give every rank a socket to its parent and its children in the control tree."""
        secret, hosts = self.spread.secret, world.allgather(socket.gethostname())
        address = own_address(hosts)
        self._bell.bind((address, 0))
        children = set(self.routes.children(self.rank))
        with socket.create_server((address, 0), backlog=max(1, len(children))) as listener:
            table = world.allgather((address, listener.getsockname()[1], self._bell.getsockname()[1]))
            self._bells = [(host, bell) for host, _, bell in table]
            parent = self.routes.parent(self.rank)
            if parent is not None:
                self._add(wire.connect(table[parent][:2], secret, self.rank, parent))
            while children:
                channel = wire.accept(listener, secret, self.rank, children)
                children.discard(channel.peer)
                self._add(channel)
        world.Barrier()
        _forget_shared_memory()

    def _add(self, channel: wire.Channel) -> None:
        self._channels[channel.peer] = channel
        self._peers[channel.sock.fileno()] = channel.peer
        self._poll.register(channel.sock, select.EPOLLIN)

    # -- control messages

    def send(self, rank: int, message: Any) -> None:
        """Queue a control message for a neighbour in the control tree. The only method for any thread."""
        self._send(rank, wire.encode(message))

    def _send(self, rank: int, body: bytes) -> None:
        channel = self._channels.get(rank)
        if channel is not None and not channel.send(body):
            self._poll.modify(channel.sock, select.EPOLLIN | select.EPOLLOUT)

    def send_down(self, message: Any) -> None:
        """Send a message that has ``ranks`` towards all of them, once per child that leads to any of them."""
        children = self.routes.children_towards(self.rank, message.ranks)
        if children:
            body = wire.encode(message)
            for child in children:
                self._send(child, body)

    def send_up(self, message: Any) -> None:
        parent = self.routes.parent(self.rank)
        assert parent is not None
        self.send(parent, message)

    @property
    def control_bytes(self) -> int:
        """Bytes of control messages this rank has sent."""
        return sum(channel.bytes_sent for channel in self._channels.values())

    def _send_rest(self, channel: wire.Channel) -> None:
        """The socket takes more; stop watching for that when nothing is left."""
        if channel.flush():
            self._poll.modify(channel.sock, select.EPOLLIN)

    def _hear(self, rank: int) -> None:
        channel = self._channels[rank]
        try:
            messages = channel.receive()
        except OSError:
            self._poll.unregister(channel.sock)
            del self._peers[channel.sock.fileno()]
            del self._channels[rank]
            channel.close()
            if not self.stopping:
                self.deliver(Lost(rank))
            return
        for message in messages:
            self.deliver(message)

    # -- MPI requests

    def post(self, requests: list[MPI.Request], keep: Any, done: Callable[[], None] | None = None) -> None:
        """Progress these requests; ``keep`` holds their memory alive; ``done`` runs when all have completed."""
        self._requests.append((requests, keep, done))

    def ring(self, rank: int) -> None:
        try:
            self._bell.sendto(b"!", self._bells[rank])
        except OSError:
            pass  # a bell is a hint: the receiver looks by itself after MISSED_BELL_SECONDS

    def exchange(self, group: str, payload: bytes, done: Callable[[list[bytes]], None]) -> None:
        """All-gather ``payload`` (any length) over a group; ``done`` gets everybody's, in group order."""
        comm = self.groups[group]
        size = comm.size
        lengths = bytearray(8 * size)
        mine = len(payload).to_bytes(8, "little")

        def gather() -> None:
            counts = [int.from_bytes(lengths[8 * i : 8 * i + 8], "little") for i in range(size)]
            box = bytearray(sum(counts))
            starts = [sum(counts[:i]) for i in range(size)]

            def finish() -> None:
                done([bytes(box[s : s + n]) for s, n in zip(starts, counts, strict=True)])

            request = comm.Iallgatherv([payload, MPI.BYTE], [box, counts, starts, MPI.BYTE])
            self.post([request], (payload, box), finish)

        self.post([comm.Iallgather([mine, MPI.BYTE], [lengths, MPI.BYTE])], (mine, lengths), gather)

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def _progress_requests(self) -> None:
        if not self._requests:
            return
        finished = [entry for entry in self._requests if MPI.Request.Testall(entry[0])]
        if finished:
            self.progress = True
            gone = set(map(id, finished))
            self._requests = [entry for entry in self._requests if id(entry) not in gone]
            for _, _, done in finished:
                if done:
                    done()

    # -- the loop

    def wake(self) -> None:
        """Wake the loop from another thread."""
        os.eventfd_write(self._wake, 1)

    def turn(self, expecting: bool, until: float | None = None) -> None:
        """Progress MPI, then wait for something to happen, at most until the time ``until`` (perf_counter)."""
        self._progress_requests()
        now = time.perf_counter()
        if self.progress:
            self._idle_turns, self._last_progress = 0, now
        self.progress = False
        self._idle_turns += 1
        nap = self._nap(expecting, now)
        self._wait(nap if until is None else max(0.0, min(nap, until - now)))

    def _nap(self, expecting: bool, now: float) -> float:
        """How long to sleep: short and growing while MPI has something in flight, else until the next event."""
        if self._requests or now < self._look_until:
            if self._idle_turns <= YIELDS_BEFORE_SLEEP:
                os.sched_yield()
                return 0.0
            first, fresh, stale = NAP_SECONDS
            longest = fresh if now - self._last_progress < 1 else stale
            return min(first * 1.2 ** min(self._idle_turns - YIELDS_BEFORE_SLEEP, 60), longest)
        return MISSED_BELL_SECONDS if expecting else HEARTBEAT_SECONDS

    def _wait(self, seconds: float) -> None:
        if 0 < seconds < EPOLL_RESOLUTION:
            select.select([self._poll], [], [], seconds)
            seconds = 0
        for descriptor, event in self._poll.poll(seconds):
            self.progress = True
            if descriptor == self._wake:
                os.eventfd_read(descriptor)
            elif descriptor == self._bell.fileno():
                self._look_until = time.perf_counter() + LOOK_SECONDS
                self._silence_bell()
            elif descriptor == self._signals.fileno():
                for number in self._signals.recv(64):
                    self.deliver(Signal(self.rank, number))
            elif (rank := self._peers.get(descriptor)) is not None:
                if event & select.EPOLLOUT:
                    self._send_rest(self._channels[rank])
                if event & ~select.EPOLLOUT:
                    self._hear(rank)

    def _silence_bell(self) -> None:
        try:
            while self._bell.recv(16):
                pass
        except BlockingIOError:
            pass

    def finish(self) -> None:
        """Leave MPI in order, together with all other ranks."""
        MPI.COMM_WORLD.Barrier()
        MPI.Finalize()
