"""Seconds and bytes of one weight version from trainer ranks to engines (mesh/channel/writer.py). Pure arithmetic."""

from dataclasses import dataclass

from titan_rl.controller.planning.forecast.rates import Rates


@dataclass(frozen=True)
class Route:
    """From trainer ranks to replicas of so many ranks each."""

    shards: int
    """Of the model, over the trainer's ranks; its replicas send, too."""
    senders: int
    replicas: int
    ranks: int
    crosses_hosts: bool
    copies: int
    """Of the model that trainers send; what is more, hosts hand on to each other."""


@dataclass(frozen=True)
class Syncing:
    publish: float
    """Cast, copied and summed, before the next update may begin."""
    fetch: float
    """Beside generation."""
    apply: float
    """Generation stands still."""
    sent: float
    """Bytes of one trainer rank."""
    received: float
    """Bytes of one engine rank."""

    @property
    def seconds(self) -> float:
        """From a version's publication until all have it."""
        return self.publish + self.fetch + self.apply


def syncing(parameters: int, element: int, route: Route, rates: Rates) -> Syncing:
    """A shard is read in fp32 and written as it is sent, then read for its checksum; the reader writes and sums it, and
    reads it again into the parameters."""
    nbytes = float(parameters * element)
    held, received = nbytes / route.shards, nbytes / route.ranks
    sent = nbytes * route.copies / route.senders
    bandwidth = rates.network if route.crosses_hosts else rates.link
    return Syncing(
        publish=(parameters / route.shards * 4 + 2 * held) / rates.memory,
        fetch=max(sent, received) / bandwidth + rates.seconds_sync,
        apply=2 * received / rates.memory,
        sent=sent,
        received=received,
    )
