"""Libraries about time: ranges of dates, a planner for rooms and jobs."""

from random import Random

from repository import Library


def _date(r: Random) -> str:
    return r.choice(
        (
            f"2024-{r.randint(1, 12):02d}-{r.randint(1, 28):02d}",
            f"2024-0{r.choice('23')}-{r.choice(('28', '29', '01'))}",
            f"{r.choice((1900, 2000, 2023, 2100))}-02-{r.choice(('27', '28'))}",
            r.choice(("2023-12-31", "2024-12-30", "2024-01-01", "2024-04-30", "2023-01-31")),
        )
    )


DATES = Library(
    name="date-ranges",
    about="<<Dates as texts such as 2024-02-29, and ranges of them|Calendar arithmetic without a time of day>>",
    names="""
        daycount: calendarkit almanac; days_mod: calendar_mod dates_mod; spans_mod: periods_mod ranges_mod
        is_leap: leap_year has_leap_day; month_length: days_in_month length_of_month; to_number: day_number serial
        from_number: date_of_number from_serial; add_days: plus_days days_later; add_months: plus_months months_later
        weekday: day_of_week week_day; days_between: num_days distance_in_days; overlap_days: shared_days common_days
        workdays: num_workdays business_days; month_ends: ends_of_months last_days; date: day iso_date
    """,
    files={
        "daycount/days_mod.py": '''"""<<Single dates|Days and months>>."""

LENGTHS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
NAMES = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]


def is_leap(year):
    """<<Whether a year has a 29 February|Check for a leap year>>."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def month_length(year, month):
    """<<Number of days of a month|How long a month is>>."""
    return 29 if month == 2 and is_leap(year) else LENGTHS[month - 1]


def split_date(date):
    """<<Year, month and day of a text|Parts of a date>>; ValueError for a day that does not exist."""
    year, month, number = (int(part) for part in date.split("-"))
    if not 1 <= month <= 12 or not 1 <= number <= month_length(year, month):
        raise ValueError("no such day")
    return [year, month, number]


def to_number(date):
    """<<Days since 0001-01-01, which is day 1|Number of a date>>."""
    year, month, number = split_date(date)
    before = year - 1
    leaps = before // 4 - before // 100 + before // 400
    return before * 365 + leaps + sum(month_length(year, m) for m in range(1, month)) + number


def weekday(date):
    """<<Mon, Tue and so on|Name of the day of the week>>."""
    return NAMES[(to_number(date) - 1) % 7]


def add_days(date, count):
    """<<Date some days later, or earlier for a negative count|Add days>>."""
    year, month, number = split_date(date)
    number += count
    while number > month_length(year, month):
        number -= month_length(year, month)
        month += 1
        if month > 12:
            year, month = year + 1, 1
    while number < 1:
        month -= 1
        if month < 1:
            year, month = year - 1, 12
        number += month_length(year, month)
    return f"{year:04d}-{month:02d}-{number:02d}"


def add_months(date, count):
    """<<Same day some months later, or the last day of a shorter month|Add months>>."""
    year, month, number = split_date(date)
    months = year * 12 + month - 1 + count
    year, month = months // 12, months % 12 + 1
    return f"{year:04d}-{month:02d}-{min(number, month_length(year, month)):02d}"
''',
        "daycount/spans_mod.py": '''"""<<Ranges of dates|Spans>>; both ends belong to a range."""

from .days_mod import add_days, add_months, month_length, split_date, to_number, weekday


def days_between(first, last):
    """<<Number of days of a range, both ends included|Length of a range>>; 0 if it ends before it begins."""
    return max(0, to_number(last) - to_number(first) + 1)


def overlap_days(one, other):
    """<<Number of days that two ranges share|Days in both ranges>>."""
    return days_between(max(one[0], other[0]), min(one[1], other[1]))


def workdays(first, last, holidays):
    """<<Number of days of a range that are neither at a weekend nor holidays|Count workdays>>."""
    total = 0
    for offset in range(days_between(first, last)):
        current = add_days(first, offset)
        if weekday(current) not in ("Sat", "Sun") and current not in holidays:
            total += 1
    return total


def month_ends(first, count):
    """<<Last days of some months, that of the first date included|Ends of months in a row>>."""
    result = []
    for offset in range(count):
        year, month, _ = split_date(add_months(first, offset))
        result.append(f"{year:04d}-{month:02d}-{month_length(year, month):02d}")
    return result
''',
    },
    calls={
        "is_leap": lambda r: [r.choice((1900, 2000, 2100, 2400, 1800, 1600, r.randint(1990, 2030)))],
        "month_length": lambda r: [r.choice((1900, 2000, 2023, 2024)), r.choice((2, 2, r.randint(1, 12)))],
        "to_number": lambda r: [_date(r)],
        "weekday": lambda r: [_date(r)],
        "add_days": lambda r: [_date(r), r.choice((1, -1, r.randint(-400, 400), r.randint(0, 31)))],
        "add_months": lambda r: [r.choice((_date(r), "2024-01-31", "2023-12-31")), r.randint(-14, 14)],
        "days_between": lambda r: [_date(r), _date(r)],
        "overlap_days": lambda r: [
            [f"2024-01-{r.randint(1, 9):02d}", f"2024-01-{r.randint(9, 20)}"],
            [f"2024-01-{r.randint(5, 15):02d}", f"2024-01-{r.randint(15, 30)}"],
        ],
        "workdays": lambda r: [
            f"2024-03-0{r.randint(1, 9)}",
            f"2024-03-{r.randint(10, 31)}",
            r.sample(("2024-03-09", "2024-03-12", "2024-03-25"), r.randint(0, 2)),
        ],
        "month_ends": lambda r: [_date(r), r.randint(0, 4)],
    },
    bugs=r"""
century: (year % 100 != 0 or year % 400 == 0) => (year % 100 != 0 or year % 400 != 0)
    The year 2000 has no leap day, and 1900 has one.
    Leap years at the turn of a century are wrong.
every-century: and (year % 100 != 0 or year % 400 == 0) => and year % 100 != 0
    The year 2000 is not a leap year.
    Years that 400 divides have no 29 February.
thirty: LENGTHS = [31, 28, 31, 30, 31, 30, 31, 31, 30, => LENGTHS = [31, 28, 31, 30, 31, 30, 31, 30, 30,
    August is too short.
    The last day of August does not exist.
last-day: 1 <= number <= month_length(year, month): => 1 <= number < month_length(year, month):
    The last day of a month is refused.
    Dates at the end of a month raise an error.
first-weekday: NAMES[(to_number(date) - 1) % 7] => NAMES[to_number(date) % 7]
    Days of the week are one too late.
    It says Tuesday for a Monday.
leaps: before // 4 - before // 100 + before // 400 => before // 4 - before // 100
    Numbers of dates are some days too low.
    Days of the week are wrong by several days.
year-end: year, month = year + 1, 1 => year, month = year, 1
    Adding days over New Year stays in the same year.
    The year does not change after December.
short-month: {min(number, month_length(year, month)):02d}" => {min(number, 28):02d}"
    Days after the 28th are lost when months are added.
    Adding months to the 30th gives the 28th.
both-ends: to_number(last) - to_number(first) + 1) => to_number(last) - to_number(first))
    The last day of a range is not counted.
    A range of one day has no days.
shared: days_between(max(one[0], other[0]), => days_between(min(one[0], other[0]),
    Shared days include days before one of the ranges.
    The overlap begins too early.
weekend: not in ("Sat", "Sun") and => not in ("Sun",) and
    Saturdays count as workdays.
    A week has six workdays.
first-month: add_months(first, offset)) => add_months(first, offset + 1))
    The month of the first date is left out.
    The list of last days begins a month late.
""",
)


def _meetings(r: Random) -> list:
    result = []
    for name in r.sample("abcdef", r.randint(1, 5)):
        start = r.choice((540, 570, 600, 630, 660, 720))
        result.append([name, start, start + r.choice((30, 60, 60, 90))])
    return result


def _jobs(r: Random) -> dict:
    names = "pqrst"[: r.randint(2, 5)]
    return {
        name: {"time": r.randint(1, 9), "after": r.sample(names[:at], min(at, r.randint(0, 2)))}
        for at, name in enumerate(names)
    }


PLANNER = Library(
    name="scheduling",
    about="<<Plans for meeting rooms and for jobs that wait for others|Scheduling in minutes of a day>>",
    names="""
        dayplan: timetables scheduler; rooms_mod: meetings_mod bookings; jobs_mod: tasks_mod workflow
        clock_text: as_clock time_text; clashes: conflicts double_bookings; free_slots: gaps openings
        rooms_needed: num_rooms min_rooms; assign_rooms: allocate_rooms place_meetings
        most_meetings: best_selection max_meetings; finish_times: ends_of_jobs completion_times
        critical_path: longest_chain bottleneck; round_robin: take_turns time_slices
        meetings: bookings_list appointments; jobs: work_items steps_by_name
    """,
    files={
        "dayplan/rooms_mod.py": '''"""<<Meetings and rooms|Rooms>>; a meeting is [name, start, end] in minutes."""


def clock_text(minutes):
    """<<Text such as 09:05|Time of day for minutes>>; 24 hours on it begins anew."""
    return f"{minutes // 60 % 24:02d}:{minutes % 60:02d}"


def clashes(meetings):
    """<<Pairs of names whose meetings overlap; those that only touch do not|Find conflicts>>, in the order given."""
    pairs = []
    for at, (name, start, end) in enumerate(meetings):
        for other, begin, finish in meetings[at + 1 :]:
            if start < finish and begin < end:
                pairs.append([name, other])
    return pairs


def free_slots(meetings, opens, closes, least=1):
    """<<Free times between opening and closing, as texts, of at least some minutes|Find gaps>>."""
    slots = []
    free_from = opens
    for _, start, end in sorted(meetings, key=lambda meeting: meeting[1]):
        if start - free_from >= least:
            slots.append(f"{clock_text(free_from)}-{clock_text(start)}")
        free_from = max(free_from, end)
    if closes - free_from >= least:
        slots.append(f"{clock_text(free_from)}-{clock_text(closes)}")
    return slots


def rooms_needed(meetings):
    """<<Largest number of meetings at the same time|How many rooms are enough>>."""
    changes = [(start, 1) for _, start, _ in meetings] + [(end, -1) for _, _, end in meetings]
    most = 0
    now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def assign_rooms(meetings):
    """<<Room for each meeting, from 1: the lowest that is free|Distribute meetings over rooms>>, by start."""
    ends = []
    rooms = {}
    for name, start, end in sorted(meetings, key=lambda meeting: (meeting[1], meeting[0])):
        for number, busy_until in enumerate(ends):
            if busy_until <= start:
                ends[number] = end
                rooms[name] = number + 1
                break
        else:
            ends.append(end)
            rooms[name] = len(ends)
    return rooms


def most_meetings(meetings):
    """<<Names of as many meetings as one person can attend, earliest end first|Choose meetings without overlap>>."""
    chosen = []
    free_from = 0
    for name, start, end in sorted(meetings, key=lambda meeting: (meeting[2], meeting[0])):
        if start >= free_from:
            chosen.append(name)
            free_from = end
    return chosen
''',
        "dayplan/jobs_mod.py": '''"""<<Jobs that wait for others|Jobs>>; each has a time and names of jobs before it."""


def finish_times(jobs):
    """<<End of each job, when all begin as soon as they may|Earliest ends>>."""
    ends = {}

    def end_of(name):
        if name not in ends:
            begin = max((end_of(other) for other in jobs[name]["after"]), default=0)
            ends[name] = begin + jobs[name]["time"]
        return ends[name]

    for name in sorted(jobs):
        end_of(name)
    return ends


def critical_path(jobs):
    """<<Chain of jobs that decides when all is done, first job first|Longest chain>>; ties go to the first name."""
    ends = finish_times(jobs)
    current = min(ends, key=lambda name: (-ends[name], name))
    chain = [current]
    while jobs[current]["after"]:
        current = min(jobs[current]["after"], key=lambda name: (-ends[name], name))
        chain.insert(0, current)
    return chain


def round_robin(jobs, slice_length):
    """<<Names in the order in which jobs get a slice of time, until all are done|Take turns>>; sorted at first."""
    rest = [[name, jobs[name]["time"]] for name in sorted(jobs)]
    turns = []
    while rest:
        name, left = rest.pop(0)
        turns.append(name)
        if left > slice_length:
            rest.append([name, left - slice_length])
    return turns
''',
    },
    calls={
        "clock_text": lambda r: [r.randint(0, 1700)],
        "clashes": lambda r: [_meetings(r)],
        "free_slots": lambda r: [_meetings(r), 540, r.choice((720, 780, 840)), r.choice((1, 30, 45, 60))],
        "rooms_needed": lambda r: [_meetings(r)],
        "assign_rooms": lambda r: [_meetings(r)],
        "most_meetings": lambda r: [_meetings(r)],
        "finish_times": lambda r: [_jobs(r)],
        "critical_path": lambda r: [_jobs(r)],
        "round_robin": lambda r: [_jobs(r), r.randint(1, 4)],
    },
    bugs=r"""
midnight: {minutes // 60 % 24:02d} => {minutes // 60:02d}
    Times after midnight have hours above 23.
    The clock does not begin anew after 24 hours.
touch: if start < finish and begin < end: => if start <= finish and begin <= end:
    Meetings that follow each other are reported as conflicts.
    A meeting that begins when another ends counts as a clash.
pairs-twice: in meetings[at + 1 :]: => in meetings[at:]:
    Every meeting clashes with itself.
    The list of conflicts has names in pairs with themselves.
contained: free_from = max(free_from, end) => free_from = end
    A short meeting inside a long one makes free time that there is not.
    Time is reported as free while a longer meeting goes on.
least: if start - free_from >= least: => if start - free_from > least:
    A gap of exactly the least length is missing.
    Gaps that are just long enough are not listed.
evening: if closes - free_from >= least: => if closes - free_from < least:
    Free time at the end of the day is missing.
    The last gap before closing is not listed.
back-to-back: for _, change in sorted(changes): => for _, change in sorted(changes, key=lambda pair: pair[0]):
    A room too many is needed for meetings that follow each other.
    Meetings back to back seem to need two rooms.
most: most = max(most, now)\n    return most => most = now\n    return most
    No rooms are needed at all.
    The number of rooms is always zero.
free-room: if busy_until <= start: => if busy_until < start:
    A room is not used again right after a meeting.
    Meetings that follow each other get different rooms.
room-start: rooms[name] = number + 1 => rooms[name] = number
    Rooms are numbered from zero, some of them.
    Meetings are put into room 0.
earliest-end: key=lambda meeting: (meeting[2], meeting[0])): => key=lambda meeting: (meeting[1], meeting[0])):
    Too few meetings are chosen where a long one starts early.
    The choice prefers meetings that begin early.
last-end: chosen.append(name)\n            free_from = end => chosen.append(name)\n            free_from = start
    Chosen meetings overlap.
    One person is sent to two meetings at the same time.
all-before: begin = max((end_of(other) => begin = min((end_of(other)
    Jobs begin before all that they wait for are done.
    A job waits only for the first of several others.
chain-tie: min(ends, key=lambda name: (-ends[name], name)) => min(ends, key=lambda name: (ends[name], name))
    The chain ends at the job that is done first.
    The longest chain is a short one.
slice: if left > slice_length: => if left >= slice_length:
    A job that is done gets another turn.
    There is an extra turn when the time is a multiple of the slice.
""",
)

LIBRARIES = [DATES, PLANNER]
