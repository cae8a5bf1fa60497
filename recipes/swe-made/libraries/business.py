"""Libraries for banks and shops: a ledger of accounts, invoices."""

from random import Random

from repository import Library

_PEOPLE = ("ann", "bob", "cy")


def _entries(r: Random) -> list:
    entries = []
    for _ in range(r.randint(2, 6)):
        kind = r.choice(("deposit", "deposit", "withdraw", "transfer", "undo"))
        who = r.sample(_PEOPLE, 2)
        entries.append({"kind": kind, "from": who[0], "to": who[1], "amount": r.choice((10, 20, 25, 50, 75))})
    return entries


LEDGER = Library(
    name="ledger",
    about="<<Accounts of a small bank, in whole cents|A ledger with deposits, transfers and interest>>",
    names="""
        bankbook: accountkit cashbook; accounts_mod: book_mod postings; statements_mod: interest_mod reports_mod
        run_entries: process_entries balances_after; history: balance_history running_balances
        statement: account_statement lines_for; yearly_interest: interest_for earned_interest
        monthly_fee: account_fee fee_for; overdrawn: in_debt below_zero; split_amount: shares_of divide_amount
        format_cents: money_text written_amount; Bank: Book Registry; balances: holdings funds
        amount: cents sum_moved; entries: postings_list journal
    """,
    files={
        "bankbook/accounts_mod.py": '''"""<<Accounts and entries|The bank>>."""

LIMIT = -<<20|30|40>>


class Bank:
    """<<Balances by name|Accounts>>; no withdrawal goes below the limit."""

    def __init__(self):
        self.balances = {}
        self.done = []

    def change(self, name, amount):
        """Add an amount, which may be negative; False if the limit forbids it."""
        after = self.balances.get(name, 0) + amount
        if amount < 0 and after < LIMIT:
            return False
        self.balances[name] = after
        return True

    def post(self, entry):
        """Do what an entry says, and remember it."""
        kind, amount = entry["kind"], entry["amount"]
        changes = []
        if kind in ("withdraw", "transfer"):
            changes.append((entry["from"], -amount))
        if kind in ("deposit", "transfer"):
            changes.append((entry["to"], amount))
        if kind == "undo":
            changes = [(name, -number) for name, number in self.done.pop()] if self.done else []
            for name, number in changes:
                self.balances[name] += number
            return
        if all(self.change(name, number) for name, number in changes):
            self.done.append(changes)


def run_entries(entries):
    """<<Balances after all entries|Process entries in order>>: deposit, withdraw, transfer, undo of the last one."""
    bank = Bank()
    for entry in entries:
        bank.post(entry)
    return bank.balances


def history(entries):
    """<<Balances after each entry|List of balances, one for each entry>>."""
    bank = Bank()
    states = []
    for entry in entries:
        bank.post(entry)
        states.append(dict(bank.balances))
    return states


def overdrawn(entries):
    """<<Names with less than nothing, in alphabetical order|Who is in debt after all entries>>."""
    return sorted(name for name, amount in run_entries(entries).items() if amount < 0)
''',
        "bankbook/statements_mod.py": '''"""<<Interest, fees and text|Statements>>."""

from .accounts_mod import history

FREE_ABOVE = <<500|1000>>


def format_cents(amount):
    """<<Text such as -1,234.05 for cents|Write an amount of cents>>."""
    sign = "-" if amount < 0 else ""
    whole, cents_left = divmod(abs(amount), 100)
    return f"{sign}{whole:,}.{cents_left:02d}"


def statement(entries, name):
    """<<Text of a balance each time that it changed|Lines of an account>>."""
    lines = []
    before = 0
    for state in history(entries):
        after = state.get(name, 0)
        if after != before:
            lines.append(f"{format_cents(after - before)} -> {format_cents(after)}")
            before = after
    return lines


def yearly_interest(amount, percent, years=1):
    """<<Amount after some years with interest, rounded down to cents each year|Compound interest>>."""
    for _ in range(years):
        amount += amount * percent // 100
    return amount


def monthly_fee(average, transfers):
    """<<Fee: nothing above the free limit, else 100, and 10 for each transfer after the third|Fee of a month>>."""
    if average > FREE_ABOVE:
        return 0
    return 100 + 10 * max(0, transfers - 3)


def split_amount(amount, parts):
    """<<Shares that add up to the amount; the first ones get a cent more|Divide cents fairly>>."""
    share, rest = divmod(amount, parts)
    return [share + (1 if position < rest else 0) for position in range(parts)]
''',
    },
    calls={
        "run_entries": lambda r: [_entries(r)],
        "history": lambda r: [_entries(r)],
        "overdrawn": lambda r: [_entries(r)],
        "format_cents": lambda r: [r.choice((r.randint(-999, 999), r.randint(-9, 9), r.randint(100000, 99999999)))],
        "statement": lambda r: [_entries(r), r.choice(_PEOPLE)],
        "yearly_interest": lambda r: [r.randint(50, 5000), r.randint(1, 9), r.randint(0, 4)],
        "monthly_fee": lambda r: [r.choice((0, 499, 500, 501, 999, 1000, 1001)), r.randint(0, 8)],
        "split_amount": lambda r: [r.randint(0, 100), r.randint(1, 7)],
    },
    bugs=r"""
no-debt: if amount < 0 and after < LIMIT: => if amount < 0 and after < 0:
    The agreed overdraft cannot be used.
    Withdrawals are refused as soon as they would go below zero.
transfer-to: if kind in ("deposit", "transfer"): => if kind == "deposit":
    Transferred money does not arrive.
    A transfer takes money from one account and it is gone.
transfer-from: if kind in ("withdraw", "transfer"): => if kind == "withdraw":
    A transfer creates money.
    The sender of a transfer loses nothing.
undo-sign: changes = [(name, -number) for => changes = [(name, number) for
    Taking an entry back does it a second time.
    Undo doubles the last entry.
undo-first: for name, number in self.done.pop()] => for name, number in self.done.pop(0)]
    Undo takes back the first entry and not the last.
    The wrong entry is undone.
aliased: states.append(dict(bank.balances)) => states.append(bank.balances)
    All states of the history are the last one.
    The history shows the final balances for every entry.
debt: if amount < 0) => if amount <= 0)
    Accounts with nothing are said to be in debt.
    A balance of zero counts as overdrawn.
cents: .{cents_left:02d}" => .{cents_left}"
    Amounts with few cents lack a digit.
    Five cents are written like fifty.
minus: divmod(abs(amount), 100) => divmod(amount, 100)
    Negative amounts are written with wrong digits.
    The text of a debt has the minus sign twice, or the wrong cents.
before: lines.append(f"{format_cents(after - before)} -> => lines.append(f"{format_cents(before - after)} ->
    Changes in statements have the wrong sign.
    A deposit is listed with a minus.
stale: -> {format_cents(after)}")\n            before = after => -> {format_cents(after)}")
    Later changes in a statement are measured from nothing.
    Statements list changes that did not happen.
compound: amount += amount * percent // 100 => amount += 100 * percent // 100
    Interest is the same for every amount.
    Interest does not grow with the amount.
fee-limit: if average > FREE_ABOVE: => if average >= FREE_ABOVE - 1:
    Accounts at the free limit itself pay nothing.
    The fee is waived although the average is not above the limit.
free-transfers: max(0, transfers - 3) => max(0, transfers - 2)
    The third transfer of a month costs something already.
    One transfer too many is charged.
rest: (1 if position < rest else 0) => (1 if position <= rest else 0)
    Shares add up to more than the amount.
    One share too many gets an extra cent.
""",
)


def _lines(r: Random) -> list:
    goods = ("pen", "desk", "lamp", "book")
    return [
        {
            "name": r.choice(goods),
            "price": r.choice((50, 199, 1250, 5)),
            "count": r.randint(1, 12),
            "rate": r.choice((0, 7, 19)),
        }
        for _ in range(r.randint(1, 4))
    ]


INVOICE = Library(
    name="invoice",
    about="<<Invoices with tax, discounts and rounding, in whole cents|Amounts of invoices>>",
    names="""
        billing: invoices receipts; rounding_mod: cents_mod precision; totals_mod: amounts_mod sums_mod
        round_half_up: rounded_half_up round_cents; round_to_step: cash_rounding to_coin
        line_total: price_of_line line_amount; net_total: total_without_tax sum_of_lines
        tax_by_rate: taxes tax_amounts; gross_total: total_due amount_due; apply_coupon: with_coupon reduced
        installments: payment_plan rates_of_payment; change_coins: give_change coins_for; discount: rebate reduction
        lines: positions_sold items_sold
    """,
    files={
        "billing/rounding_mod.py": '''"""<<Rounding of cents|How cents are rounded>>."""

COINS = [200, 100, 50, 20, 10, 5, 2, 1]


def round_half_up(numerator, denominator):
    """<<Quotient rounded to a whole number, halves away from zero|Division with rounding>>."""
    sign = -1 if numerator < 0 else 1
    return sign * ((2 * abs(numerator) + denominator) // (2 * denominator))


def round_to_step(amount, step=5):
    """<<Nearest multiple of a step, halves upwards|Round an amount as cash is>>."""
    return round_half_up(amount, step) * step


def change_coins(amount):
    """<<Coins for an amount, the fewest, large ones first|Coins to give back>>."""
    coins = []
    for coin in COINS:
        while amount >= coin:
            coins.append(coin)
            amount -= coin
    return coins


def installments(amount, number):
    """<<Equal payments, the last of which takes up the rest|Split an amount into payments>>."""
    payment = round_half_up(amount, number)
    return [payment] * (number - 1) + [amount - payment * (number - 1)]
''',
        "billing/totals_mod.py": '''"""<<Totals of an invoice|Sums>>; lines have price, count and rate."""

from .rounding_mod import round_half_up

BULK = <<10|8|6>>
BULK_PERCENT = <<5|10>>


def line_total(line):
    """<<Price times count, less a percentage from a bulk of pieces on|Amount of a line>>."""
    amount = line["price"] * line["count"]
    discount = round_half_up(amount * BULK_PERCENT, 100) if line["count"] >= BULK else 0
    return amount - discount


def net_total(lines):
    """<<Sum of all lines, without tax|Total before tax>>."""
    total = 0
    for line in lines:
        total += line_total(line)
    return total


def tax_by_rate(lines):
    """<<Tax for each rate, as text, rounded once for all lines of the rate|Tax by rate; no entry for rate 0>>."""
    sums = {}
    for line in lines:
        sums[line["rate"]] = sums.get(line["rate"], 0) + line_total(line)
    return {str(rate): round_half_up(amount * rate, 100) for rate, amount in sums.items() if rate}


def apply_coupon(amount, coupon):
    """<<Amount after a coupon: percent or cents, from a minimum on|Reduce an amount>>; never below 0."""
    if amount < coupon.get("minimum", 0):
        return amount
    if coupon["kind"] == "percent":
        return amount - round_half_up(amount * coupon["value"], 100)
    return max(0, amount - coupon["value"])


def gross_total(lines, coupon=None):
    """<<Net and tax together, then the coupon|What is to be paid>>."""
    amount = net_total(lines) + sum(tax_by_rate(lines).values())
    return apply_coupon(amount, coupon) if coupon else amount
''',
    },
    calls={
        "round_half_up": lambda r: [r.randint(-60, 60), r.choice((2, 4, 10, 3))],
        "round_to_step": lambda r: [r.randint(0, 120), r.choice((2, 5, 10))],
        "change_coins": lambda r: [r.randint(0, 500)],
        "installments": lambda r: [r.randint(10, 1000), r.randint(1, 7)],
        "line_total": lambda r: [_lines(r)[0]],
        "net_total": lambda r: [_lines(r)],
        "tax_by_rate": lambda r: [_lines(r)],
        "apply_coupon": lambda r: [r.choice((100, 250, 1000, r.randint(1, 300))), _coupon(r)],
        "gross_total": lambda r: [_lines(r), r.choice((None, _coupon(r)))],
    },
    bugs=r"""
half: (2 * abs(numerator) + denominator) => (2 * abs(numerator) + denominator - 1)
    Halves are rounded down.
    A quotient that ends in one half loses it.
negative: sign = -1 if numerator < 0 else 1 => sign = 1
    Negative quotients lose their sign.
    Rounding makes negative amounts positive.
step: return round_half_up(amount, step) * step => return amount // step * step
    Cash amounts are always rounded down.
    The nearest multiple above an amount is never chosen.
exact-coin: while amount >= coin: => while amount > coin:
    Change does not add up, the last cent is missing.
    Amounts that are a coin are paid in smaller ones.
one-coin: while amount >= coin:\n            coins => if amount >= coin:\n            coins
    Each coin is given at most once.
    Change that needs two equal coins is too small.
last-payment: + [amount - payment * (number - 1)] => + [amount - payment * number]
    The last payment is wrong, even negative.
    Payments do not add up to the amount.
bulk: if line["count"] >= BULK else 0 => if line["count"] > BULK else 0
    The rebate starts one piece too late.
    An order of exactly the bulk number gets no rebate.
discount-sign: return amount - discount => return amount + discount
    Large orders cost more per piece.
    The rebate is added to the price.
last-total: total += line_total(line) => total = line_total(line)
    The total is that of the last line.
    All lines but one are missing from the sum.
rates: sums[line["rate"]] = sums.get(line["rate"], 0) + line_total(line) => sums[line["rate"]] = line_total(line)
    Tax is computed for one line of each rate.
    A second line with the same rate of tax replaces the first.
zero-rate: for rate, amount in sums.items() if rate} => for rate, amount in sums.items()}
    Lines without tax make an entry of zero.
    There is an entry for the rate of zero.
minimum: if amount < coupon.get("minimum", 0): => if amount <= coupon.get("minimum", 0):
    A coupon is refused at its exact minimum.
    An amount that just reaches the minimum is not reduced.
percent: return amount - round_half_up(amount * coupon => return round_half_up(amount * coupon
    A coupon of ten percent takes ninety off.
    Percent coupons leave only the reduction.
coupon-net: return apply_coupon(amount, coupon) if coupon else amount => return amount
    Coupons have no effect on what is to be paid.
    What is due does not change with a coupon.
""",
)


def _coupon(r: Random) -> dict:
    coupon = {"kind": r.choice(("percent", "cents")), "value": r.choice((5, 10, 300))}
    return coupon | r.choice(({}, {"minimum": r.choice((100, 250, 1000))}))


LIBRARIES = [LEDGER, INVOICE]
