"""Libraries that follow rules: inventory, permissions."""

from random import Random

from repository import Library

_GOODS = ("bolt", "nut", "gear", "wire")


def _movements(r: Random) -> list:
    kinds = ("in", "in", "out", "out", "set")
    return [[r.choice(kinds), r.choice(_GOODS[:2]), r.choice((1, 2, 2, 4))] for _ in range(r.randint(1, 6))]


INVENTORY = Library(
    name="inventory",
    about="<<Stock of a small warehouse|What is in stock, what is short, and what it is worth>>",
    names="""
        warehouse: stockroom depot; stock_mod: shelves holdings; reports_mod: overviews summaries_mod
        replay: run_movements process_events; available: stock_after on_hand; shortages: missing_goods too_low
        stock_value: worth total_value; restock_order: purchase_list reorder; pick_boxes: pack choose_boxes
        top_sellers: best_sellers most_sold; Stock: Warehouse Holdings; receive: take_in put_in
        withdraw: take_out hand_out; movements: events log; counts: levels quantities; prices: price_list costs
    """,
    files={
        "warehouse/stock_mod.py": '''"""<<Stock and its movements|Movements>>: lists of kind, item and number."""

LOW = <<3|4|5>>


class Stock:
    """<<Counts by item|What is in stock>>; a number is never negative."""

    def __init__(self):
        self.counts = {}
        self.refused = []

    def receive(self, item, number):
        """Add a number of an item."""
        self.counts[item] = self.counts.get(item, 0) + number

    def withdraw(self, item, number):
        """Take a number out; refused where there is too little."""
        if self.counts.get(item, 0) < number:
            self.refused.append(item)
            return False
        self.counts[item] -= number
        if self.counts[item] == 0:
            del self.counts[item]
        return True

    def replace_count(self, item, number):
        """Set the number of an item, after a count by hand."""
        self.counts.pop(item, None)
        if number > 0:
            self.receive(item, number)


def replay(movements):
    """<<Counts and refused items after all movements|Run movements on an empty stock>>: in, out, set."""
    stock = Stock()
    for kind, item, number in movements:
        if kind == "in":
            stock.receive(item, number)
        elif kind == "out":
            stock.withdraw(item, number)
        elif kind == "set":
            stock.replace_count(item, number)
    return {"counts": stock.counts, "refused": stock.refused}


def available(movements, item):
    """<<Number of an item after all movements, 0 if there is none|How many there are of an item>>."""
    return replay(movements)["counts"].get(item, 0)
''',
        "warehouse/reports_mod.py": '''"""<<Reports on a stock|What to buy, and what it is worth>>."""

from .stock_mod import LOW, replay


def shortages(movements, needed):
    """<<Number that is missing of each needed item; none where there is enough|What is short>>."""
    counts = replay(movements)["counts"]
    result = {}
    for item, number in needed.items():
        missing = number - counts.get(item, 0)
        if missing > 0:
            result[item] = missing
    return result


def stock_value(counts, prices, default=1):
    """<<Sum of counts times prices; the default price for items without one|What a stock is worth>>."""
    return sum(number * prices.get(item, default) for item, number in counts.items())


def restock_order(counts, package_size):
    """<<Packages of each item that is at or below the lowest stock, to fill up to twice that|What to order>>."""
    order = {}
    for item in sorted(counts):
        if counts[item] <= LOW:
            wanted = 2 * LOW - counts[item]
            order[item] = -(-wanted // package_size)
    return order


def pick_boxes(number, sizes):
    """<<Boxes for a number of items, large ones first, and one small box for a rest|Choose boxes>>."""
    boxes = []
    rest = number
    for size in sorted(sizes, reverse=True):
        while rest >= size:
            boxes.append(size)
            rest -= size
    if rest > 0:
        boxes.append(min(sizes))
    return boxes


def top_sellers(movements, most=2):
    """<<Items that went out most often in number, equal ones by name|What sells best>>."""
    sold = {}
    for kind, item, number in movements:
        if kind == "out":
            sold[item] = sold.get(item, 0) + number
    ranked = sorted(sold, key=lambda item: (-sold[item], item))
    return ranked[:most]
''',
    },
    calls={
        "replay": lambda r: [_movements(r)],
        "available": lambda r: [_movements(r), r.choice(_GOODS)],
        "shortages": lambda r: [_movements(r), {item: r.randint(0, 6) for item in r.sample(_GOODS, 2)}],
        "stock_value": lambda r: [
            {item: r.randint(0, 9) for item in _GOODS},
            {"bolt": r.randint(1, 5), "nut": 2},
            r.randint(0, 4),
        ],
        "restock_order": lambda r: [{i: r.randint(0, 7) for i in r.sample(_GOODS, 3)}, r.randint(1, 4)],
        "pick_boxes": lambda r: [r.randint(0, 40), r.sample((2, 3, 5, 8, 12), r.randint(1, 3))],
        "top_sellers": lambda r: [[["out", r.choice(_GOODS), r.randint(1, 3)] for _ in range(5)], r.randint(1, 3)],
    },
    bugs=r"""
last-piece: if self.counts.get(item, 0) < number: => if self.counts.get(item, 0) <= number:
    The last pieces of an item cannot be taken out.
    Taking all that is there is refused.
add: self.counts[item] = self.counts.get(item, 0) + number => self.counts[item] = number
    A second delivery of an item replaces the first.
    Deliveries are not added to what was in stock.
keep-zero: if self.counts[item] == 0:\n            del => if self.counts[item] < 0:\n            del
    Items that are sold out stay in the counts with a zero.
    Nothing in stock is reported as zero pieces.
refused: self.refused.append(item)\n            return False => return False
    Refused items are not recorded.
    The list of refused items is always empty.
set-count: self.counts.pop(item, None)\n        if number => if number
    Counting by hand adds to the old number.
    A new count does not replace the old one.
enough: if missing > 0:\n            result => if missing >= 0:\n            result
    Items of which there is just enough are reported as short.
    Nothing is missing, but it is listed with a zero.
default-price: prices.get(item, default) for => prices.get(item, 0) for
    Items without a price are worth nothing.
    The default price is ignored.
low: if counts[item] <= LOW: => if counts[item] < LOW:
    Items exactly at the lowest stock are not ordered.
    The lowest stock itself does not lead to an order.
packages: order[item] = -(-wanted // package_size) => order[item] = wanted // package_size
    Orders are a package short.
    Packages are rounded down, so that too little is ordered.
box-size: while rest >= size: => while rest > size:
    A full box is not used if it would fit exactly.
    Boxes for an exact number are chosen badly.
rest-box: boxes.append(min(sizes)) => boxes.append(max(sizes))
    The rest gets the largest box.
    A few items left over go into a box that is too large.
ranking: key=lambda item: (-sold[item], item)) => key=lambda item: (sold[item], item))
    The items that sell worst come first.
    The ranking of sales is upside down.
ties: key=lambda item: (-sold[item], item)) => key=lambda item: -sold[item])
    Equal sales are not ordered by name.
    Items that sold equally come in the order of their first sale.
""",
)


def _path(r: Random) -> str:
    return "/" + "/".join(r.choices(("docs", "img", "src", "a.txt", "b"), k=r.randint(1, 3)))


def _rules(r: Random) -> list:
    patterns = ("/docs", "/docs/*", "/img/*", "*", "*", "/src")
    actions = ("read", "write", "*", "*")
    effects = ("allow", "allow", "deny")
    return [[r.choice(effects), r.choice(patterns), r.choice(actions)] for _ in range(r.randint(1, 4))]


def _roles(r: Random) -> dict:
    return {"admin": ["editor"], "editor": ["reader"], "reader": [], "guest": r.choice(([], ["reader"]))}


PERMISSIONS = Library(
    name="permissions",
    about="<<Permissions by roles and rules|Who may do what, by roles, rules and modes>>",
    names="""
        accessrules: gatekeeper grants; roles_mod: groups_mod ranks_mod; rules_mod: policy_mod checks_mod
        all_roles: expanded_roles inherited; has_role: holds_role is_in_role; members_of: users_with holders
        mode_text: mode_string show_mode; parse_mode: mode_number read_mode; path_matches: covers fits_path
        is_allowed: permitted may; explain: deciding_rule reason; allowed_actions: possible_actions granted
        rules: policies statements; action: operation verb
    """,
    files={
        "accessrules/roles_mod.py": '''"""<<Roles, and modes of files|Roles>>."""

LETTERS = "rwx"


def all_roles(parents, role):
    """<<Role and all that it inherits from, sorted|Roles that a role includes>>."""
    found = set()
    pending = [role]
    while pending:
        current = pending.pop()
        if current not in found:
            found.add(current)
            pending.extend(parents.get(current, []))
    return sorted(found)


def has_role(parents, own, wanted):
    """<<Whether one of some roles is or includes the wanted one|Check for a role>>."""
    return any(wanted in all_roles(parents, role) for role in own)


def members_of(parents, users, wanted):
    """<<Users with a role, in order of their names|Who has a role, directly or not>>."""
    return sorted(user for user, own in users.items() if has_role(parents, own, wanted))


def mode_text(mode):
    """<<Nine letters for a number such as 0o754|Mode of a file as rwxr-xr-->>."""
    text = ""
    for place in range(9):
        bit = 1 << (8 - place)
        text += LETTERS[place % 3] if mode & bit else "-"
    return text


def parse_mode(text):
    """<<Number of nine letters|Mode of a file, from its text>>; ValueError for another length."""
    if len(text) != 9:
        raise ValueError("nine letters are needed")
    total = 0
    for letter in text:
        total = total * 2 + (letter != "-")
    return total
''',
        "accessrules/rules_mod.py": '''"""<<Rules for paths|Rules>>: lists of effect, pattern and action."""

ACTIONS = ("delete", "read", "write")


def path_matches(pattern, path):
    """<<Whether a path is the pattern, or lies below it if this ends with /*|Match a path>>; * is for all."""
    if pattern == "*":
        return True
    if pattern.endswith("/*"):
        return path.startswith(pattern[:-1])
    return path == pattern


def explain(rules, path, action):
    """<<Position of the rule that decides: the first that denies, or the first that allows|Deciding rule>>; or -1."""
    allowing = -1
    for position, (effect, pattern, what) in enumerate(rules):
        if what in ("*", action) and path_matches(pattern, path):
            if effect == "deny":
                return position
            if allowing < 0:
                allowing = position
    return allowing


def is_allowed(rules, path, action, default=False):
    """<<Whether a rule allows and none denies; the default without any rule|Decide on an action>>."""
    position = explain(rules, path, action)
    if position < 0:
        return default
    return rules[position][0] == "allow"


def allowed_actions(rules, path):
    """<<Actions that are allowed, in alphabetical order|All that may be done with a path>>."""
    return [action for action in ACTIONS if is_allowed(rules, path, action)]
''',
    },
    calls={
        "all_roles": lambda r: [_roles(r), r.choice(("admin", "editor", "reader", "guest", "other"))],
        "has_role": lambda r: [
            _roles(r),
            r.sample(("admin", "editor", "guest"), r.randint(1, 2)),
            r.choice(("reader", "editor")),
        ],
        "members_of": lambda r: [
            _roles(r),
            {name: [r.choice(("admin", "editor", "reader", "guest"))] for name in r.sample(("zoe", "ann", "bob"), 3)},
            r.choice(("editor", "reader", "admin")),
        ],
        "mode_text": lambda r: [r.randint(0, 511)],
        "parse_mode": lambda r: ["".join(r.choice((letter, "-")) for letter in "rwxrwxrwx"[: r.choice((9, 9, 9, 8))])],
        "path_matches": lambda r: [
            r.choice(("/docs", "/docs/*", "*", "/img/*", "/src")),
            r.choice((_path(r), "/docsx")),
        ],
        "explain": lambda r: [_rules(r), _path(r), r.choice(("read", "write", "delete"))],
        "is_allowed": lambda r: [_rules(r), _path(r), r.choice(("read", "write", "delete")), r.choice((True, False))],
        "allowed_actions": lambda r: [_rules(r), _path(r)],
    },
    bugs=r"""
depth: pending.extend(parents.get(current, [])) => pending.extend(parents.get(current, [])[1:])
    Roles are not inherited.
    A role includes only itself.
any-role: return any(wanted in all_roles => return all(wanted in all_roles
    All of the roles must include the wanted one.
    A second role without the right takes it away.
direct: if has_role(parents, own, wanted)) => if wanted in own)
    Only direct members are listed.
    Users who have a role by another one are missing.
bits: bit = 1 << (8 - place) => bit = 1 << place
    The text of a mode is mirrored.
    Owner and others are exchanged in modes.
mode-value: total = total * 2 + (letter != "-") => total = total * 2 + (letter in "rw")
    The right to execute is lost when a mode is read.
    The letter x counts for nothing.
below: path.startswith(pattern[:-1]) => path.startswith(pattern[:-2])
    Paths that only begin with the same letters match.
    A pattern for what is below a folder also fits the folder itself.
any-action: if what in ("*", action) and => if what == action and
    Rules for all actions are ignored.
    A star in place of the action has no effect.
deny-first: if effect == "deny": => if effect == "deny" and allowing < 0:
    A rule that denies is ignored after one that allows.
    Denials do not win against an earlier permission.
default: return default\n    return rules => return False\n    return rules
    The default is ignored.
    Without any rule that fits the answer is always no.
effect: return rules[position][0] == "allow" => return rules[position][0] != "allow"
    What is allowed is refused, and the other way round.
    Decisions are inverted.
""",
)

LIBRARIES = [INVENTORY, PERMISSIONS]
