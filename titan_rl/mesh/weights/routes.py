"""Which generator rank takes a version from which other: planned anew with every version, from those who take part.

Ranks that read over TCP hand versions on to each other (channel/relay/trees.py). The others, which share memory with
their trainers or have RDMA hardware, read from the trainers, and nobody reads from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from titan_rl.mesh.channel.relay.gathering import Parent, Route
from titan_rl.mesh.channel.relay.memory import RelayHandle
from titan_rl.mesh.channel.relay.trees import Parents, parents_of, parents_of_a_late_one
from titan_rl.mesh.channel.transports import Place, Setting, Transport, choose_transport
from titan_rl.mesh.members.replica import Replica

_RELAYED = frozenset({"tcp", "shared_memory"})


def is_relay(transports: Sequence[Transport]) -> bool:
    """Of a rank that reads from trainers by these: whether it hands on what it reads. All of that must be staged in
    hosts' memory, so that all of it has one kind of checksum."""
    return "tcp" in transports and set(transports) <= _RELAYED


@dataclass(frozen=True)
class _Seat:
    """A replica's rank."""

    place: Place
    relay: RelayHandle | None


class WeightRoutes:
    """Routes of versions between the ranks of connected replicas."""

    def __init__(self, setting: Setting):
        self.setting: Setting = setting
        self._seats: dict[Replica, list[_Seat]] = {}
        self._holders: list[Replica] = []
        """Which took the version that is live."""

    def connected(self, replica: Replica, places: Sequence[Place], relays: Sequence[RelayHandle | None]) -> None:
        self._seats[replica] = [_Seat(*of_rank) for of_rank in zip(places, relays, strict=True)]
        self._seats = {one: seats for one, seats in self._seats.items() if one is replica or not one.is_dead}

    def hold(self, replicas: Sequence[Replica]) -> None:
        """Set the replicas that hold the live version."""
        self._holders = list(replicas)

    @property
    def holders(self) -> list[Replica]:
        """Live replicas that hold the live version."""
        return [replica for replica in self._holders if not replica.is_dead]

    def together(self, replicas: Sequence[Replica], epoch: int) -> list[list[Route]]:
        """Routes by replica and rank, for a simultaneous update."""
        routes = [[Route(epoch) for _ in self._seats.get(replica, ())] for replica in replicas]
        for reader in range(max(map(len, routes), default=0)):
            seats = [self._seats[replica][reader] for replica in replicas]
            takers = [number for number, seat in enumerate(seats) if seat.relay is not None]
            parents = parents_of([seats[number].place.host for number in takers])
            for number, own_parents in zip(takers, parents, strict=True):
                routes[number][reader] = self._route(
                    seats[number], [seats[taker] for taker in takers], own_parents, epoch
                )
        return routes

    def alone(self, replica: Replica, epoch: int) -> list[Route]:
        """Routes by rank of a late replica, from the holders."""
        routes = []
        for reader, seat in enumerate(self._seats.get(replica, ())):
            others = [self._seats[holder][reader] for holder in self.holders if holder in self._seats]
            others = [other for other in others if other.relay is not None] if seat.relay is not None else []
            parents = parents_of_a_late_one(seat.place.host, [other.place.host for other in others], replica.number)
            routes.append(self._route(seat, others, parents, epoch))
        return routes

    def _route(self, seat: _Seat, others: Sequence[_Seat], parents: Parents, epoch: int) -> Route:
        return Route(epoch, tuple(None if place is None else self._parent(seat, others[place]) for place in parents))

    def _parent(self, seat: _Seat, other: _Seat) -> Parent:
        assert other.relay is not None  # nobody else is a parent
        return Parent(other.relay, choose_transport(self.setting, other.place.in_memory, seat.place.in_memory))

    @property
    def num_hosts(self) -> int:
        """Number of hosts that relay versions."""
        seats = (seat for seats in self._seats.values() for seat in seats if seat.relay is not None)
        return len({seat.place.host for seat in seats})
