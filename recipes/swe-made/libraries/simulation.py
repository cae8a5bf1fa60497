"""Libraries that simulate: a state machine, the game of life."""

from random import Random

from repository import Library


def _events(r: Random) -> list:
    return r.choices(("coin", "push", "fail", "repair", "wait"), k=r.randint(1, 7))


def _table(r: Random) -> list:
    rows = [
        ["locked", "fail", "jammed"],
        ["locked", "coin", "open"],
        ["open", "push", "locked"],
        ["*", "fail", "broken"],
        ["broken", "repair", "locked"],
        ["open", "coin", "open"],
        ["broken", "fail", "scrap"],
    ]
    return rows[r.randint(0, 1) : r.randint(5, 7)]


MACHINE = Library(
    name="state-machine",
    about="<<State machines from tables of transitions|Machines with states, events and guards>>",
    names="""
        automaton: statekit flowmachine; machine_mod: core_mod engine_mod; analysis_mod: graph_mod checks_mod
        next_state: follow step_to; run: final_state run_events; trace: visited_states path_of
        ignored: unused_events events_without_effect; reachable: states_from can_reach; dead_ends: final_states traps
        visits: visit_counts times_entered; dwell: longest_stay longest_run; accepts: is_accepted ends_well
        table: transitions arrows; state: mode phase; event: signal input_name
    """,
    files={
        "automaton/machine_mod.py": '''"""<<Running a machine|Transitions>>: rows of state or *, event, state."""


def next_state(table, state, event):
    """<<State after an event: a row of the state itself comes before one for any|Next state>>; None without a row."""
    general = None
    for source, name, target in table:
        if name != event:
            continue
        if source == state:
            return target
        if source == "*":
            general = target
    return general


def run(table, start, events):
    """<<State after all events; those without a row are ignored|Last state>>."""
    state = start
    for event in events:
        state = next_state(table, state, event) or state
    return state


def trace(table, start, events):
    """<<States from the first one on, one more for each event that has a row|States in order>>."""
    states = [start]
    for event in events:
        target = next_state(table, states[-1], event)
        if target is not None:
            states.append(target)
    return states


def ignored(table, start, events):
    """<<Positions of events that had no row, from 0|Which events were ignored>>."""
    state = start
    positions = []
    for position, event in enumerate(events):
        target = next_state(table, state, event)
        if target is None:
            positions.append(position)
        else:
            state = target
    return positions


def accepts(table, start, events, good):
    """<<Whether every event has a row, and the last state is a good one|Check a word>>."""
    return not ignored(table, start, events) and run(table, start, events) in good
''',
        "automaton/analysis_mod.py": '''"""<<Questions about a machine|Analysis>>."""

from .machine_mod import next_state, trace


def reachable(table, start):
    """<<States that some events lead to, the start included, sorted|Which states can be reached>>."""
    events = {name for _, name, _ in table}
    found = {start}
    pending = [start]
    while pending:
        current = pending.pop()
        for event in events:
            target = next_state(table, current, event)
            if target is not None and target not in found:
                found.add(target)
                pending.append(target)
    return sorted(found)


def dead_ends(table, start):
    """<<Reachable states that no event leads out of to another|States without a way out>>, sorted."""
    events = sorted({name for _, name, _ in table})
    result = []
    for state in reachable(table, start):
        targets = {next_state(table, state, event) for event in events} - {None, state}
        if not targets:
            result.append(state)
    return result


def visits(table, start, events):
    """<<How often each state was entered; the start counts once|Counts of states>>."""
    result = {}
    for state in trace(table, start, events):
        result[state] = result.get(state, 0) + 1
    return result


def dwell(table, start, events):
    """<<Longest run of one state in the trace|Most equal states in a row>>."""
    longest = 0
    length = 0
    before = None
    for state in trace(table, start, events):
        length = length + 1 if state == before else 1
        longest = max(longest, length)
        before = state
    return longest
''',
    },
    calls={
        "next_state": lambda r: [
            _table(r),
            r.choice(("locked", "open", "broken")),
            r.choice(("coin", "push", "fail", "repair")),
        ],
        "run": lambda r: [_table(r), r.choice(("locked", "open")), _events(r)],
        "trace": lambda r: [_table(r), r.choice(("locked", "open")), _events(r)],
        "ignored": lambda r: [_table(r), r.choice(("locked", "open")), _events(r)],
        "accepts": lambda r: [
            _table(r),
            "locked",
            r.choices(("coin", "push", "coin", "fail"), k=r.randint(0, 3)),
            ["open", r.choice(("locked", "broken"))],
        ],
        "reachable": lambda r: [r.sample(_table(r), r.randint(2, 4)), r.choice(("locked", "open", "broken"))],
        "dead_ends": lambda r: [r.sample(_table(r), r.randint(2, 4)), r.choice(("locked", "open", "broken"))],
        "visits": lambda r: [_table(r), r.choice(("locked", "open")), _events(r)],
        "dwell": lambda r: [_table(r), r.choice(("locked", "open")), _events(r)],
    },
    bugs=r"""
any-first: if source == "*": => if source == "*" and name == "any":
    Rows for any state are never used.
    The star in a table has no meaning any more.
own-first: if source == state:\n            return target\n => if source == state:\n            general = target\n
    A later row for any state wins against the state's own.
    The state's own row does not come first.
no-row: state = next_state(table, state, event) or state => state = next_state(table, state, event) or start
    An event without a row resets the machine.
    Ignored events lead back to the start.
trace-from: target = next_state(table, states[-1], event) => target = next_state(table, states[0], event)
    Every event is applied to the first state.
    The list of states does not follow the machine.
trace-none: if target is not None:\n            states => if target != states[-1]:\n            states
    States that are entered again at once are missing, and ignored events show up.
    The list of states holds a None for ignored events.
positions: in enumerate(events):\n        target => in enumerate(events, 1):\n        target
    Positions of ignored events are one too high.
    Positions begin with one.
follow: positions.append(position)\n        else:\n            state = target => positions.append(position)
    Ignored events are found as if the state never changed.
    Events that are fine later on are reported as ignored.
ignored-ok: return not ignored(table, start, events) and run( => return run(
    Words with events that have no row are accepted.
    Unknown events do not lead to a refusal.
reach-start: found = {start}\n    pending => found = set()\n    pending
    The start itself is missing from what can be reached.
    The first state is not among the reachable ones.
reach-far: found.add(target)\n                pending.append(target) => found.add(target)
    Only direct neighbours can be reached.
    States two events away are missing.
self-loop: for event in events} - {None, state} => for event in events} - {None}
    States with an event that leads back to themselves are no dead ends.
    A state that can only be kept is not seen as a dead end.
count: result[state] = result.get(state, 0) + 1 => result[state] = result.get(state, 1)
    Each state is counted once.
    Entering a state again does not raise its count.
stay: length = length + 1 if state == before else 1 => length = length + 1 if state == before else 0
    Stays are one too short.
    The longest run is too small by one.
""",
)


def _board(r: Random) -> list:
    width = r.randint(2, 5)
    return ["".join(r.choices("#..", k=width)) for _ in range(r.randint(2, 5))]


LIFE = Library(
    name="game-of-life",
    about="<<Conway's game of life on small boards|Boards of cells that live and die>>",
    names="""
        lifegame: cellboard conway; board_mod: grid_mod cells_mod; rules_mod: steps_mod evolution
        parse_board: read_board board_from; draw: show board_text; neighbours: count_around living_around
        step: next_board tick; simulate: evolve run_steps; population: living_cells count_living
        bounding_box: box_around extent; period: cycle_length repeats_after; shifted: moved translate
        board: grid field; wrap: closed torus
    """,
    files={
        "lifegame/board_mod.py": '''"""<<Boards as lists of texts|Boards>>; # is a living cell."""

ALIVE = "#"


def neighbours(board, row, column, wrap=False):
    """<<Living cells among the eight around|Count of living neighbours>>; over the edges if the board wraps."""
    height, width = len(board), len(board[0])
    total = 0
    for down in (-1, 0, 1):
        for right in (-1, 0, 1):
            if down == 0 and right == 0:
                continue
            i, j = row + down, column + right
            if wrap:
                i, j = i % height, j % width
            if 0 <= i < height and 0 <= j < width and board[i][j] == ALIVE:
                total += 1
    return total


def population(board):
    """<<Number of living cells|How many cells live>>."""
    return sum(line.count(ALIVE) for line in board)


def bounding_box(board):
    """<<First row, first column, last row and last column with life|Box around all life>>; None without any."""
    rows = [i for i, line in enumerate(board) if ALIVE in line]
    columns = [j for line in board for j, cell in enumerate(line) if cell == ALIVE]
    if not rows:
        return None
    return [rows[0], min(columns), rows[-1], max(columns)]


def shifted(board, down, right):
    """<<Board with all cells moved; what leaves at one edge comes in at the other|Move all cells>>."""
    height, width = len(board), len(board[0])
    return [
        "".join(board[(i - down) % height][(j - right) % width] for j in range(width)) for i in range(height)
    ]
''',
        "lifegame/rules_mod.py": '''"""<<The rules, and many steps|Life and death>>."""

from .board_mod import ALIVE, neighbours, population

BORN = (3,)
STAYS = (2, 3)


def step(board, wrap=False):
    """<<Next board: cells are born with 3 neighbours, and stay with 2 or 3|One step>>."""
    result = []
    for row, line in enumerate(board):
        new = ""
        for column, cell in enumerate(line):
            count = neighbours(board, row, column, wrap)
            lives = count in (STAYS if cell == ALIVE else BORN)
            new += ALIVE if lives else "."
        result.append(new)
    return result


def simulate(board, steps, wrap=False):
    """<<Board after some steps|Run several steps>>; 0 steps change nothing."""
    current = list(board)
    for _ in range(steps):
        current = step(current, wrap)
    return current


def populations(board, steps):
    """<<Number of living cells at the beginning and after each step|How life develops>>."""
    counts = [population(board)]
    for done in range(steps):
        counts.append(population(simulate(board, done + 1)))
    return counts


def period(board, most=12):
    """<<Steps after which a board comes back for the first time|Length of a cycle>>; 0 if it does not."""
    current = step(board)
    for done in range(1, most + 1):
        if current == board:
            return done
        current = step(current)
    return 0
''',
    },
    calls={
        "neighbours": lambda r: [_board(r), r.randint(0, 1), r.randint(0, 1), r.choice((True, False))],
        "population": lambda r: [_board(r)],
        "bounding_box": lambda r: [r.choice((_board(r), ["....", r.choice((".#..", "....", "..#.")), "...."]))],
        "shifted": lambda r: [_board(r), r.randint(-2, 2), r.randint(-2, 2)],
        "step": lambda r: [_board(r), r.choice((True, False))],
        "simulate": lambda r: [_board(r), r.randint(0, 3), r.choice((True, False))],
        "populations": lambda r: [_board(r), r.randint(0, 3)],
        "period": lambda r: [
            r.choice((_board(r), ["..." + "." * r.randint(0, 3), "###" + "." * r.randint(0, 3), "..."], [".", "."]))
        ],
    },
    bugs=r"""
born: BORN = (3,) => BORN = (2,)
    Cells are born with two neighbours.
    Life spreads too quickly.
stays: STAYS = (2, 3) => STAYS = (2,)
    Cells with three neighbours die.
    A block of four cells does not stay.
itself: if down == 0 and right == 0:\n                continue => if down == 0 and right == 9:\n                continue
    A cell is its own neighbour.
    Counts around living cells are one too high.
diagonal: for right in (-1, 0, 1): => for right in (0, 1):
    Cells on the left are not counted.
    One side of a cell is ignored.
wrap-width: i, j = i % height, j % width => i, j = i % height, j % height
    Boards that wrap and are not square are computed wrong.
    Wrapping to the sides jumps to the wrong column.
edge: if 0 <= i < height and 0 <= j < width and => if i < height and j < width and
    Boards without wrapping wrap at their upper and left edges.
    Cells at the top see those at the bottom.
last-row: rows[-1], max(columns)] => rows[-1] + 1, max(columns)]
    The last row of the box is one too far down.
    The box has a row too many.
shift-sign: board[(i - down) % height] => board[(i + down) % height]
    Cells move up when they should move down.
    The vertical direction of moves is reversed.
dead-rule: (STAYS if cell == ALIVE else BORN) => (BORN if cell == ALIVE else STAYS)
    The rules for living and dead cells are exchanged.
    Empty cells are born with two neighbours, living ones die with two.
wrap-lost: current = step(current, wrap) => current = step(current)
    Several steps ignore the wrapping.
    A single step wraps, a simulation does not.
in-place: for _ in range(steps):\n        current => for _ in range(steps - 1):\n        current
    A step too few is made.
    One step does nothing.
begin: counts = [population(board)] => counts = []
    The first count is missing from the development.
    The number at the beginning is not listed.
period-start: return done\n        current => return done - 1\n        current
    Cycles are reported one step too short.
    A board that does not change has period 0.
""",
)

LIBRARIES = [MACHINE, LIFE]
