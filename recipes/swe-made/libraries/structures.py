"""Libraries of data structures: a priority queue, caches."""

from random import Random

from repository import Library


def _pushes(r: Random) -> list:
    kinds = ("push", "push", "push", "pop", "pop", "raise", "raise", "remove", "peek")
    return [[r.choice(kinds), r.choice("abc"), r.randint(0, 3)] for _ in range(r.randint(4, 10))]


QUEUE = Library(
    name="priority-queue",
    about="<<A priority queue on a binary heap|Queues in which the most urgent goes first>>",
    names="""
        urgent: firstserve heapqueue; heap_mod: tree_mod storage_mod; queue_mod: line_mod orders_mod
        sift_up: bubble_up move_up; sift_down: sink move_down; heap_sort: sorted_by_heap in_heap_order
        smallest: k_smallest lowest_few; merge_sorted: merged combine_sorted; is_heap: heap_ordered check_heap
        replay: run_operations perform; drain: serve_all empty_queue; wait_times: waiting_times delays
        PriorityQueue: UrgentQueue HeapQueue; operations: actions steps; heap: tree store; rank: priority urgency
    """,
    files={
        "urgent/heap_mod.py": '''"""<<Heaps as lists|Heaps>>: the smallest is first."""


def sift_up(heap, at):
    """<<Heap after what stands at a place has moved up|Repair upwards>>, in place."""
    while at > 0 and heap[at] < heap[(at - 1) // 2]:
        above = (at - 1) // 2
        heap[at], heap[above] = heap[above], heap[at]
        at = above
    return heap


def sift_down(heap, at):
    """<<Heap after what stands at a place has moved down|Repair downwards>>, in place."""
    while 2 * at + 1 < len(heap):
        child = 2 * at + 1
        if child + 1 < len(heap) and heap[child + 1] < heap[child]:
            child += 1
        if heap[at] <= heap[child]:
            break
        heap[at], heap[child] = heap[child], heap[at]
        at = child
    return heap


def is_heap(items):
    """<<Whether no value is smaller than the one above it|Check the order of a heap>>."""
    return all(items[(at - 1) // 2] <= items[at] for at in range(1, len(items)))


def pop_first(heap):
    """<<Smallest value, which is taken out|Take the first>>."""
    first = heap[0]
    last = heap.pop()
    if heap:
        heap[0] = last
        sift_down(heap, 0)
    return first


def heap_sort(items, descending=False):
    """<<Values in order, by a heap|Sort with a heap>>."""
    heap = []
    for value in items:
        heap.append(value)
        sift_up(heap, len(heap) - 1)
    result = [pop_first(heap) for _ in range(len(heap))]
    return result[::-1] if descending else result


def smallest(items, most):
    """<<The smallest values in order, at most so many|First few of the sorted values>>."""
    return heap_sort(items)[: max(0, most)]
''',
        "urgent/queue_mod.py": '''"""<<A queue with ranks|Queue>>; low ranks are served first."""

from .heap_mod import pop_first, sift_up


class PriorityQueue:
    """<<Names by rank; equal ranks in the order of arrival|Queue of names>>."""

    def __init__(self):
        self.heap = []
        self.arrivals = 0

    def push(self, name, rank):
        """Add a name."""
        self.heap.append([rank, self.arrivals, name])
        self.arrivals += 1
        sift_up(self.heap, len(self.heap) - 1)

    def pop(self):
        """Take the most urgent name out; None from an empty queue."""
        return pop_first(self.heap)[2] if self.heap else None

    def peek(self):
        """Show the most urgent name, and leave it there."""
        return self.heap[0][2] if self.heap else None

    def remove(self, name):
        """Take out all entries of a name."""
        kept = [entry for entry in self.heap if entry[2] != name]
        self.heap = []
        for entry in sorted(kept):
            self.heap.append(entry)

    def change_rank(self, name, rank):
        """Give a waiting name a new rank; it keeps its arrival."""
        for at, entry in enumerate(self.heap):
            if entry[2] == name:
                self.heap[at] = [rank, entry[1], name]
                break
        self.heap.sort()


def replay(operations):
    """<<What each pop and peek gave|Run operations>>: push, pop, peek, raise, remove, with a name and a rank."""
    queue = PriorityQueue()
    seen = []
    for kind, name, rank in operations:
        if kind == "push":
            queue.push(name, rank)
        elif kind == "pop":
            seen.append(queue.pop())
        elif kind == "peek":
            seen.append(queue.peek())
        elif kind == "raise":
            queue.change_rank(name, rank)
        else:
            queue.remove(name)
    return seen


def drain(pairs):
    """<<Names in the order in which they are served|Fill a queue, and empty it>>."""
    queue = PriorityQueue()
    for name, rank in pairs:
        queue.push(name, rank)
    return [queue.pop() for _ in pairs]


def wait_times(pairs, minutes):
    """<<Minutes that each name waits if all take equally long|Waiting times by name>>."""
    return {name: place * minutes for place, name in enumerate(drain(pairs))}
''',
    },
    calls={
        "sift_up": lambda r: [sorted(r.randint(0, 9) for _ in range(6)) + [r.randint(0, 9)], 6],
        "sift_down": lambda r: [[r.randint(0, 9)] + sorted(r.randint(0, 9) for _ in range(r.randint(2, 6))), 0],
        "is_heap": lambda r: [sorted(r.randint(0, 5) for _ in range(4)) + [r.randint(0, 5)]],
        "heap_sort": lambda r: [[r.randint(0, 20) for _ in range(r.randint(0, 7))], r.choice((True, False))],
        "smallest": lambda r: [[r.randint(0, 20) for _ in range(r.randint(2, 7))], r.randint(0, 4)],
        "replay": lambda r: [_pushes(r)],
        "drain": lambda r: [[[name, r.randint(0, 3)] for name in r.sample("abcdef", r.randint(1, 6))]],
        "wait_times": lambda r: [
            [[name, r.randint(0, 3)] for name in r.sample("abcdef", r.randint(1, 5))],
            r.randint(1, 9),
        ],
    },
    bugs=r"""
one-up: at = above\n    return => at = 0\n    return
    A small value stops after one step up.
    Repairing upwards does not reach the top.
parent: while at > 0 and heap[at] < heap[(at - 1) // 2]: => while at > 1 and heap[at] < heap[(at - 1) // 2]:
    The second value never becomes the first.
    The order is wrong when a small value comes second.
smaller-child: and heap[child + 1] < heap[child]: => and heap[child + 1] > heap[child]:
    The larger of two values moves up.
    Repairing downwards breaks the order of a heap.
second-child: if child + 1 < len(heap) and => if child + 2 < len(heap) and
    The last value is not looked at when a heap is repaired.
    Sorting goes wrong for the last two values.
one-down: at = child\n    return heap => break\n    return heap
    A large value sinks one step only.
    Values stay too far up after the first is taken out.
check: for at in range(1, len(items))) => for at in range(1, len(items) - 1))
    The last value is not checked.
    A list with a wrong last value passes as a heap.
equal: items[(at - 1) // 2] <= items[at] for => items[(at - 1) // 2] < items[at] for
    Equal values are not allowed in a heap any more.
    Heaps with two equal values fail the check.
direction: return result[::-1] if descending else result => return result if descending else result[::-1]
    Sorted values come in the opposite order.
    Descending gives ascending.
most: [: max(0, most)] => [: max(1, most)]
    Asking for no values gives one.
    Zero values cannot be asked for.
arrival: self.heap.append([rank, self.arrivals, name]) => self.heap.append([rank, -self.arrivals, name])
    Of equal ranks the last one to come is served first.
    Equal ranks are not served in the order of arrival.
rank-first: self.heap.append([rank, self.arrivals, name]) => self.heap.append([self.arrivals, rank, name])
    Ranks have no effect.
    Names are served in the order of arrival alone.
peek: return self.heap[0][2] if self.heap => return self.heap[-1][2] if self.heap
    Looking at the queue shows another name than the next pop gives.
    The name that is shown is not the most urgent one.
keep-arrival: self.heap[at] = [rank, entry[1], name] => self.heap[at] = [rank + entry[0], entry[1], name]
    A new rank is added to the old one.
    Changing a rank gives a different rank than asked for.
place: name: place * minutes for => name: (place + 1) * minutes for
    The first one waits, too.
    Waiting times include the own turn.
""",
)


def _cache_operations(r: Random) -> list:
    result = []
    for _ in range(r.randint(4, 10)):
        key = r.choice("abcd")
        kind = r.choice(("put", "put", "get", "get", "drop"))
        result.append([kind, key, r.randint(0, 9)] if kind == "put" else [kind, key])
    return result


def _timed(r: Random) -> list:
    now = 0
    result = []
    for _ in range(r.randint(3, 7)):
        now += r.randint(0, 4)
        result.append([now, *r.choice((["put", r.choice("ab"), r.randint(0, 9)], ["get", r.choice("ab")]))])
    return result


CACHES = Library(
    name="lru-cache",
    about="<<Caches with a capacity or a time to live|Small caches, replayed from lists of operations>>",
    names="""
        keepsake: cachekit remember; recent_mod: lru_mod capacity_mod; timed_mod: expiry_mod ttl_mod
        replay: run_cache perform_all; hit_rate: share_of_hits hit_share; final_keys: keys_left remaining_keys
        evictions: evicted_keys thrown_out; replay_timed: run_timed timed_results; least_used: rarest_key coldest
        RecentCache: LruCache BoundedCache; TimedCache: ExpiringCache TtlCache; capacity: room max_entries
        operations: requests commands; lifetime: max_age time_to_live
    """,
    files={
        "keepsake/recent_mod.py": '''"""<<Cache of what was used last|Least recently used goes first>>."""


class RecentCache:
    """<<Values by key; the one that was used longest ago makes room|Cache with a capacity>>."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.entries = {}
        self.evicted = []
        self.hits = 0
        self.lookups = 0

    def get(self, key):
        """Value of a key, which counts as used now; None if it is not there."""
        self.lookups += 1
        if key not in self.entries:
            return None
        self.hits += 1
        self.entries[key] = self.entries.pop(key)
        return self.entries[key]

    def put(self, key, value):
        """Store a value, which counts as used now."""
        self.entries.pop(key, None)
        if len(self.entries) >= self.capacity:
            oldest = next(iter(self.entries))
            del self.entries[oldest]
            self.evicted.append(oldest)
        self.entries[key] = value

    def drop(self, key):
        """Forget a key, if it is there."""
        if key in self.entries:
            del self.entries[key]


def run(capacity, operations):
    """<<Cache and the values of all lookups|Run operations>>: put, get, drop."""
    cache = RecentCache(capacity)
    values = []
    for kind, key, *value in operations:
        if kind == "put":
            cache.put(key, value[0])
        elif kind == "get":
            values.append(cache.get(key))
        else:
            cache.drop(key)
    return cache, values


def replay(capacity, operations):
    """<<Value of each lookup, None for a miss|Results of lookups>>."""
    return run(capacity, operations)[1]


def final_keys(capacity, operations):
    """<<Keys at the end, the one used longest ago first|What is left>>."""
    return list(run(capacity, operations)[0].entries)


def evictions(capacity, operations):
    """<<Keys that had to make room, in order|What was thrown out>>."""
    return run(capacity, operations)[0].evicted


def hit_rate(capacity, operations):
    """<<Percent of lookups that found something, rounded down; 0 without lookups|Share of hits>>."""
    cache = run(capacity, operations)[0]
    return 100 * cache.hits // cache.lookups if cache.lookups else 0
''',
        "keepsake/timed_mod.py": '''"""<<Cache with a time to live|Entries that expire>>, and counts of use."""


class TimedCache:
    """<<Values by key, for a lifetime after they were stored|Cache whose entries expire>>."""

    def __init__(self, lifetime):
        self.lifetime = lifetime
        self.entries = {}

    def put(self, now, key, value):
        """Store a value."""
        self.entries[key] = (now, value)

    def get(self, now, key):
        """Value of a key; None when its lifetime is over."""
        if key not in self.entries:
            return None
        stored, value = self.entries[key]
        if now - stored >= self.lifetime:
            del self.entries[key]
            return None
        return value


def replay_timed(lifetime, operations):
    """<<Value of each lookup|Run lists of time, kind, key and value>>; None for what is not there any more."""
    cache = TimedCache(lifetime)
    values = []
    for now, kind, key, *value in operations:
        if kind == "put":
            cache.put(now, key, value[0])
        else:
            values.append(cache.get(now, key))
    return values


def least_used(operations):
    """<<Key with the fewest lookups of those that were stored, the first of equals by name|Rarest key>>; or None."""
    counts = {}
    for kind, key, *_ in operations:
        if kind == "put":
            counts.setdefault(key, 0)
        elif kind == "get" and key in counts:
            counts[key] += 1
        elif kind == "drop":
            counts.pop(key, None)
    return min(counts, key=lambda key: (counts[key], key), default=None)
''',
    },
    calls={
        "replay": lambda r: [r.randint(1, 3), _cache_operations(r)],
        "final_keys": lambda r: [r.randint(1, 3), _cache_operations(r)],
        "evictions": lambda r: [r.randint(1, 3), _cache_operations(r)],
        "hit_rate": lambda r: [r.randint(1, 3), _cache_operations(r)],
        "replay_timed": lambda r: [r.randint(2, 6), _timed(r)],
        "least_used": lambda r: [_cache_operations(r)],
    },
    bugs=r"""
touch: self.entries[key] = self.entries.pop(key)\n        return => return
    A lookup does not count as a use.
    Keys that are looked up all the time are thrown out.
rewrite: self.entries.pop(key, None)\n        if len => if len
    Storing a key again does not make it the newest.
    Another key has to go when one is only stored again.
capacity: if len(self.entries) >= self.capacity: => if len(self.entries) > self.capacity:
    The cache holds one key too many.
    The capacity is exceeded by one.
newest: oldest = next(iter(self.entries)) => oldest = list(self.entries)[-1]
    The newest key is thrown out.
    The cache throws out what was used last.
record: self.evicted.append(oldest) => self.evicted.append(key)
    The list of what was thrown out has the new keys.
    Wrong names are listed as thrown out.
hits: self.hits += 1\n        self => self.hits = 1\n        self
    Only one hit is counted.
    The share of hits falls with each further hit.
lookups: self.lookups += 1 => self.lookups += key in self.entries
    Misses do not count as lookups.
    The share of hits is always one hundred percent, or zero.
drop: if key in self.entries:\n            del => if key in self.evicted:\n            del
    Keys that were dropped are still there.
    Dropping a key has no effect.
percent: return 100 * cache.hits // cache.lookups => return cache.hits // cache.lookups * 100
    Shares of hits are zero or one hundred.
    The percentage has no values in between.
expire: if now - stored >= self.lifetime: => if now - stored > self.lifetime:
    Entries live a moment too long.
    A value is still given when its lifetime is just over.
restored: self.entries[key] = (now, value) => self.entries[key] = (self.entries.get(key, (now,))[0], value)
    Storing again does not renew the lifetime.
    A new value expires with the old one's time.
never: if now - stored >= self.lifetime: => if stored >= self.lifetime + now:
    Entries never expire.
    The lifetime has no effect.
rarest: return min(counts, key=lambda key: (counts => return max(counts, key=lambda key: (counts
    The most used key is named.
    The key that is used most is called the rarest.
forget: elif kind == "drop":\n            counts => elif kind == "forget":\n            counts
    Dropped keys can still be the rarest.
    A key that is not there any more is named.
""",
)

LIBRARIES = [QUEUE, CACHES]
