"""Who takes a version from whom, so that trainers send it about once whatever the number of hosts. Pure arithmetic.

One process of each host is its *carrier*: it takes the version over the network, and the others of its host take it
from the carrier. Carriers form two trees, each for half of the bytes (a *stripe*), whose roots read from the trainers.
Who has children in one tree has none in the other (as in NCCL's double binary trees): every host receives the model
once and sends it at most once, as in a chain, but the last host is log2 of their number behind the first, and not their
number.
"""

from collections.abc import Hashable, Sequence

NUM_STRIPES = 2
Parents = tuple[int | None, ...]
"""For each stripe the place of the process that it is taken from; None: from the trainers. One entry: all is one
stripe."""


def two_trees(count: int) -> list[list[int | None]]:
    """``trees[stripe][place]``: the parent of each of ``count`` places, None of the root."""
    up = [None if place == 0 else (place - 1) // 2 for place in range(count)]
    mirrored = [None if parent is None else count - 1 - parent for parent in reversed(up)]
    return [up, mirrored]


def parents_of(hosts: Sequence[Hashable]) -> list[Parents]:
    """For processes that want the same bytes, on ``hosts[i]``. The first of each host is its carrier."""
    carriers: dict[Hashable, int] = {}
    for place, host in enumerate(hosts):
        carriers.setdefault(host, place)
    trees, order = two_trees(len(carriers)), list(carriers.values())
    rank = {place: number for number, place in enumerate(order)}
    above = [[None if parent is None else order[parent] for parent in tree] for tree in trees]
    routes: list[Parents] = []
    for place, host in enumerate(hosts):
        if place in rank:
            parents = tuple(tree[rank[place]] for tree in above)
            routes.append((None,) if set(parents) == {None} else parents)
        else:
            routes.append((carriers[host],))
    return routes


def parents_of_a_late_one(host: Hashable, holders: Sequence[Hashable], number: int) -> Parents:
    """For a process that comes when others, on ``holders[i]``, have the version already. ``number`` tells late ones
    apart, so that they do not all ask the same."""
    if host in holders:
        return (holders.index(host),)
    if not holders:
        return (None,)
    first = number % len(holders)
    return tuple(dict.fromkeys((first, (first + 1) % len(holders))))


def stripes(sizes: Sequence[int], count: int = NUM_STRIPES) -> list[int]:
    """The stripe of each block: of blocks of these bytes, in order, each goes where there are the fewest bytes yet."""
    totals, stripe_of = [0] * count, []
    for size in sizes:
        stripe = totals.index(min(totals))
        totals[stripe] += size
        stripe_of.append(stripe)
    return stripe_of


def arrival_times(hosts: int, blocks: int, latency: float = 0.0) -> list[float]:
    """When each of so many hosts has all of so many equal blocks, if every host, and the trainers together, send one
    block a unit of time. ``latency``: of each block, besides. To one host it takes ``blocks`` (+ latency).

    Each sender gives its blocks in their order, to each of its children in turn, as soon as it has them.
    """
    trees, stripe_of = two_trees(hosts), stripes([1] * blocks)
    roots = [tree.index(None) for tree in trees]
    arrival = {(root, stripe): [] for stripe, root in enumerate(roots)}
    for block in range(blocks):  # the trainers', one after the other
        arrival[roots[stripe_of[block]], stripe_of[block]].append(block + 1 + latency)
    last = [0.0] * hosts
    for stripe, tree in enumerate(trees):
        children: list[list[int]] = [[] for _ in range(hosts)]
        for place, parent in enumerate(tree):
            if parent is not None:
                children[parent].append(place)
        waiting = [roots[stripe]]
        while waiting:
            place = waiting.pop()
            came = arrival.pop((place, stripe))
            last[place] = max(last[place], came[-1] if came else 0.0)
            child_times = _handed_on(came, len(children[place]), latency)
            arrival.update({(child, stripe): times for child, times in zip(children[place], child_times, strict=True)})
            waiting.extend(children[place])
    return last


def _handed_on(came: list[float], num_children: int, latency: float) -> list[list[float]]:
    """When each child has each block: one is sent at a time, to one child after the other."""
    free, arrivals = 0.0, [[] for _ in range(num_children)]
    for at in came:
        for times in arrivals:
            free = max(free, at) + 1
            times.append(free + latency)
    return arrivals
