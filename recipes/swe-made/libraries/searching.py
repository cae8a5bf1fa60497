"""Libraries about ways: a robot on a grid, search in graphs."""

from random import Random

from repository import Library


def _commands(r: Random) -> str:
    return "".join(r.choices("FFFFLRB2", k=r.randint(1, 8)))


ROBOT = Library(
    name="robot",
    about="<<A robot that walks on a grid by letters|Walks of a robot with obstacles>>",
    names="""
        gridrobot: rover walker; moves_mod: motion_mod steps_mod; maps_mod: field_mod area_mod
        turn: turned new_heading; walk: final_position run_commands; visited: path_of places_on_path
        distance_home: steps_home way_back; blocked_moves: num_blocked bumps; expand: unrolled written_out
        simplify: shortened_program reduce_turns; patrol: repeated_walk loops; heading: facing direction
        commands: program letters_given; obstacles: walls rocks
    """,
    files={
        "gridrobot/moves_mod.py": '''"""<<Directions and programs|Letters>>: F, B move, L, R turn, digits repeat."""

HEADINGS = "NESW"
STEPS = {"N": (0, 1), "E": (1, 0), "S": (0, -1), "W": (-1, 0)}


def turn(heading, letter):
    """<<Heading after a turn to the left or to the right|New direction>>."""
    change = {"L": -1, "R": 1}.get(letter, 0)
    return HEADINGS[(HEADINGS.index(heading) + change) % 4]


def expand(commands):
    """<<Letters alone: F3 is FFF|Write repetitions out>>; a digit at the beginning is ignored."""
    result = ""
    for letter in commands:
        if not letter.isdigit():
            result += letter
        elif result:
            result += result[-1] * (int(letter) - 1)
    return result


def simplify(commands):
    """<<Letters without neighbours that undo each other: LR, RL, FB, BF|Shorten a program>>."""
    stack = []
    for letter in expand(commands):
        if stack and stack[-1] + letter in ("LR", "RL", "FB", "BF"):
            stack.pop()
        else:
            stack.append(letter)
    return "".join(stack)
''',
        "gridrobot/maps_mod.py": '''"""<<Walks on a map|Maps>>, from [0, 0], with the heading north."""

from .moves_mod import STEPS, expand, turn


def follow(commands, obstacles, heading="N"):
    """<<All places, the number of blocked moves and the last heading|Walk, with everything that happens>>."""
    x, y = 0, 0
    places = [[x, y]]
    blocked = 0
    for letter in expand(commands):
        heading = turn(heading, letter)
        if letter not in "FB":
            continue
        sign = 1 if letter == "F" else -1
        target = [x + sign * STEPS[heading][0], y + sign * STEPS[heading][1]]
        if target in obstacles:
            blocked += 1
            continue
        x, y = target
        places.append(target)
    return places, blocked, heading


def walk(commands, obstacles):
    """<<Last place and heading|Where the robot ends>>, as x, y and a letter."""
    places, _, heading = follow(commands, obstacles)
    return [*places[-1], heading]


def visited(commands, obstacles):
    """<<Number of different places, the start included|How many places are seen>>."""
    places, _, _ = follow(commands, obstacles)
    return len({tuple(place) for place in places})


def blocked_moves(commands, obstacles):
    """<<Number of moves that an obstacle stopped|How often the robot bumps>>."""
    return follow(commands, obstacles)[1]


def distance_home(commands, obstacles):
    """<<Steps back to the start, along x and y|Distance from the start>>."""
    x, y = follow(commands, obstacles)[0][-1]
    return abs(x) + abs(y)


def patrol(commands, obstacles, rounds):
    """<<Place after each round of the same commands|Repeat a walk>>."""
    return [walk(expand(commands) * (done + 1), obstacles)[:2] for done in range(rounds)]
''',
    },
    calls={
        "turn": lambda r: [r.choice("NESW"), r.choice("LRF")],
        "expand": lambda r: ["".join(r.choices("FLRB123", k=r.randint(1, 6)))],
        "simplify": lambda r: ["".join(r.choices("FBLR2", k=r.randint(1, 8)))],
        "walk": lambda r: [_commands(r), [[r.randint(-1, 1), r.randint(1, 2)]]],
        "visited": lambda r: [_commands(r), [[r.randint(-1, 1), r.randint(1, 2)]]],
        "blocked_moves": lambda r: [_commands(r), [[r.randint(-1, 1), 1], [0, 2], [0, -1]]],
        "distance_home": lambda r: [_commands(r), [[r.randint(-1, 1), 2]]],
        "patrol": lambda r: [_commands(r), [[0, 3]], r.randint(0, 3)],
    },
    bugs=r"""
left: {"L": -1, "R": 1}.get => {"L": 1, "R": -1}.get
    Left and right are exchanged.
    The robot turns to the wrong side.
compass: HEADINGS = "NESW" => HEADINGS = "NEWS"
    Turning right from the east leads to the west.
    Two directions are mixed up when the robot turns.
west: "W": (-1, 0)} => "W": (1, 0)}
    Walking to the west goes to the east.
    The robot never gets a negative x by walking west.
repeat: result[-1] * (int(letter) - 1) => result[-1] * int(letter)
    Repetitions have a letter too many.
    F2 is three steps.
undo: in ("LR", "RL", "FB", "BF"): => in ("LR", "RL", "FB"):
    A step back and forward is not removed.
    Programs with BF are not shortened.
nested: stack.pop()\n        else => stack.clear()\n        else
    Shortening a program loses letters.
    Too much is removed when two letters undo each other.
back: sign = 1 if letter == "F" else -1 => sign = 1
    The robot cannot walk backwards.
    B does the same as F.
obstacle: if target in obstacles: => if [x, y] in obstacles:
    The robot walks into obstacles and then is stuck.
    Obstacles stop the robot one step too late.
count-blocked: blocked += 1 => blocked = 1
    Bumps are counted once at most.
    The number of blocked moves is never above one.
different: return len({tuple(place) for place in places}) => return len(places)
    Places that are seen twice count twice.
    The number of places counts repeated ones.
rounds: expand(commands) * (done + 1), => expand(commands) * done,
    The first round of a patrol stays at the start.
    Patrols lag one round behind.
""",
)


def _graph(r: Random) -> dict:
    nodes = "abcdef"[: r.randint(3, 6)]
    return {
        node: {other: r.randint(1, 9) for other in r.sample(nodes, r.randint(0, 3)) if other != node} for node in nodes
    }


def _acyclic(r: Random) -> dict:
    nodes = "abcdef"
    order = r.sample(nodes, 5)
    return {node: {other: 1 for other in r.sample(order[at + 1 :], min(2, 4 - at))} for at, node in enumerate(order)}


GRAPH = Library(
    name="graph-search",
    about="<<Search in small graphs with weights|Ways through directed graphs>>",
    names="""
        pathfind: graphways netroutes; search_mod: walks_mod routes_mod; structure_mod: shape_mod order_mod
        shortest_path: fewest_edges quick_path; distances: costs_from cheapest_costs
        cheapest_path: best_route least_cost_path; components: connected_parts clusters
        has_cycle: is_cyclic contains_cycle; topological: build_order ordered_nodes; within: nearby reachable_within
        reversed_graph: flipped_graph backwards; in_degrees: incoming_counts num_incoming
        graph: network edges_by_node; start: origin source; goal: target destination; frontier: wavefront border
    """,
    files={
        "pathfind/search_mod.py": '''"""<<Shortest and cheapest ways|Search>>; a graph: costs by neighbour, by node."""

import heapq


def shortest_path(graph, start, goal):
    """<<Nodes of a way with the fewest edges, the alphabetically first of these|Shortest way>>; None without one."""
    paths = {start: [start]}
    frontier = [start]
    while frontier and goal not in paths:
        following = []
        for node in frontier:
            for other in sorted(graph.get(node, {})):
                if other not in paths:
                    paths[other] = paths[node] + [other]
                    following.append(other)
        frontier = following
    return paths.get(goal)


def distances(graph, start):
    """<<Lowest cost to each node that can be reached|Costs from a node>>, by Dijkstra."""
    found = {}
    heap = [(0, start)]
    while heap:
        cost, node = heapq.heappop(heap)
        if node in found:
            continue
        found[node] = cost
        for other, weight in graph.get(node, {}).items():
            heapq.heappush(heap, (cost + weight, other))
    return found


def cheapest_path(graph, start, goal):
    """<<Nodes of a way with the lowest cost|Cheapest way>>; an empty list without one."""
    costs = distances(graph, start)
    if goal not in costs:
        return []
    path = [goal]
    while path[-1] != start:
        here = path[-1]
        sources = [node for node in sorted(costs) if here in graph.get(node, {})]
        path.append([node for node in sources if costs[node] + graph[node][here] == costs[here]][0])
    return path[::-1]


def within(graph, start, budget):
    """<<Other nodes that cost at most the budget, near ones first|What a budget is enough for>>."""
    costs = distances(graph, start)
    return sorted((node for node in costs if node != start and costs[node] <= budget), key=lambda n: (costs[n], n))
''',
        "pathfind/structure_mod.py": '''"""<<Structure of graphs|Order and parts>>."""


def reversed_graph(graph):
    """<<Graph with every edge turned around|Reverse all edges>>, costs kept."""
    result = {node: {} for node in graph}
    for node, others in graph.items():
        for other, weight in others.items():
            result.setdefault(other, {})[node] = weight
    return result


def in_degrees(graph):
    """<<Number of edges that lead to each node|Incoming edges by node>>."""
    return {node: len(sources) for node, sources in reversed_graph(graph).items()}


def topological(graph):
    """<<Nodes such that edges lead forward, alphabetical where free|Topological order>>, cycles left out."""
    degrees = in_degrees(graph)
    order = []
    ready = sorted(node for node, degree in degrees.items() if degree == 0)
    while ready:
        node = ready.pop(0)
        order.append(node)
        for other in graph.get(node, {}):
            degrees[other] -= 1
            if degrees[other] == 0:
                ready.append(other)
        ready.sort()
    return order


def has_cycle(graph):
    """<<Whether some way leads back to where it began|Check for a cycle>>."""
    return len(topological(graph)) < len(in_degrees(graph))


def components(graph):
    """<<Nodes that hang together, whatever the direction: sorted lists, large ones first|Connected parts>>."""
    backwards_edges = reversed_graph(graph)
    parts = []
    seen = set()
    for first in sorted(backwards_edges):
        if first in seen:
            continue
        part = []
        pending = [first]
        seen.add(first)
        while pending:
            node = pending.pop()
            part.append(node)
            for other in [*graph.get(node, {}), *backwards_edges[node]]:
                if other not in seen:
                    seen.add(other)
                    pending.append(other)
        parts.append(sorted(part))
    return sorted(parts, key=lambda part: (-len(part), part))
''',
    },
    calls={
        "shortest_path": lambda r: [_graph(r), "a", r.choice("abcf")],
        "distances": lambda r: [_graph(r), r.choice("ab")],
        "cheapest_path": lambda r: [_graph(r), "a", r.choice("bcd")],
        "within": lambda r: [_graph(r), "a", r.randint(1, 12)],
        "reversed_graph": lambda r: [_graph(r)],
        "in_degrees": lambda r: [_graph(r)],
        "topological": lambda r: [r.choice((_acyclic(r), _graph(r)))],
        "has_cycle": lambda r: [r.choice((_acyclic(r), _graph(r)))],
        "components": lambda r: [{n: dict.fromkeys(r.sample("abcdef", r.randint(0, 1)), 1) for n in "abcdef"}],
    },
    bugs=r"""
own-way: paths[node] + [other] => paths[start] + [other]
    Ways lack the nodes in the middle.
    Every way has at most two nodes.
weights: heapq.heappush(heap, (cost + weight, other)) => heapq.heappush(heap, (weight, other))
    Costs of a way count the last edge only.
    The cost to far nodes is too low.
hops: heapq.heappush(heap, (cost + weight, other)) => heapq.heappush(heap, (cost + 1, other))
    All edges cost one.
    Weights have no effect on costs.
backwards: return path[::-1] => return path
    Cheapest ways run from the goal to the start.
    The order of the nodes in a cheapest way is reversed.
budget: costs[node] <= budget), => costs[node] < budget),
    Nodes that cost exactly the budget are missing.
    The budget itself is not enough.
near-first: key=lambda n: (costs[n], n)) => key=lambda n: n)
    Nodes in reach are not ordered by cost.
    The nearest node is not always the first.
include-start: if node != start and costs => if costs
    The start is listed among the other nodes.
    The node itself appears in its own surroundings.
turn-around: result.setdefault(other, {})[node] = weight => result.setdefault(node, {})[other] = weight
    Edges keep their direction.
    Reversing a graph changes nothing.
cost-kept: {})[node] = weight => {})[node] = 1
    Costs are lost when edges are turned around.
    All edges of a reversed graph cost one.
no-sort: ready.append(other)\n        ready.sort() => ready.append(other)
    The order is not alphabetical where it could be.
    Nodes that become free later are always at the end.
one-way: [*graph.get(node, {}), *backwards_edges[node]]: => [*graph.get(node, {})]:
    Parts that hang together against the direction are split.
    The direction of edges matters for connected parts, it should not.
large-first: key=lambda part: (-len(part), part)) => key=lambda part: (len(part), part))
    Small parts come first.
    The order of the parts is upside down.
""",
)

LIBRARIES = [ROBOT, GRAPH]
