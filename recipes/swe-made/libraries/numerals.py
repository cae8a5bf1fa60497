"""Libraries on how numbers are written: Roman numerals, units of measure, number systems."""

from random import Random

from repository import Library


def _to_roman(number: int) -> str:
    text = ""
    for letters, unit in (("M", 1000), ("CDM", 100), ("XLC", 10), ("IVX", 1)):
        digit, number = divmod(number, unit)
        shape = ("", "0", "00", "000", "01", "1", "10", "100", "1000", "02")[digit]
        text += "".join(letters[int(place)] for place in shape)
    return text


def _roman(r: Random) -> str:
    text = _to_roman(r.choice((r.randint(1, 60), r.randint(1, 3999))))
    return r.choice((text, text, text.lower(), f" {text} "))


ROMAN = Library(
    name="roman",
    about="<<Roman numerals: reading, writing and arithmetic|Conversion between Roman numerals and numbers>>",
    names="""
        numerals: romans latin_numbers; signs: glyphs table; writing: encode_mod output_side
        reading: decode_mod input_side; to_roman: roman_of write_roman; from_roman: roman_value read_roman
        is_roman: is_numeral valid_roman; add_romans: sum_romans plus_romans; sort_romans: order_romans ranked_romans
        next_roman: successor following_roman; normalize: cleaned tidy; sign_value: value_of glyph_value
        numeral: letters written
    """,
    files={
        "numerals/signs.py": '''"""<<Values of signs|What each sign is worth>>."""

PAIRS = [
    (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"),
    (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
]
LARGEST = 3999


def normalize(numeral):
    """<<Numeral in upper case without blanks around it|Strip blanks and use capitals>>."""
    return numeral.strip().upper()


def sign_value(sign):
    """<<Value of one sign; 0 for other letters|What a single letter is worth, or 0>>."""
    for value, letters_of_pair in PAIRS:
        if letters_of_pair == sign:
            return value
    return 0
''',
        "numerals/writing.py": '''"""<<From numbers to numerals|Writing numerals>>."""

from .signs import LARGEST, PAIRS
from .reading import from_roman


def to_roman(number):
    """<<Numeral of a whole number from 1 to 3999; ValueError for others|Write a number as a numeral>>."""
    if number < 1 or number > LARGEST:
        raise ValueError("out of range")
    result = ""
    for value, sign in PAIRS:
        while number >= value:
            result += sign
            number -= value
    return result


def add_romans(numerals_to_add):
    """<<Numeral of the sum of some numerals|Sum of numerals, as a numeral>>."""
    total = 0
    for item in numerals_to_add:
        total += from_roman(item)
    return to_roman(total)


def next_roman(numeral):
    """<<Numeral after this one; after 3999 comes I again|The following numeral, which wraps around at the end>>."""
    number = from_roman(numeral)
    return to_roman(1 if number == LARGEST else number + 1)
''',
        "numerals/reading.py": '''"""<<From numerals to numbers|Reading numerals>>."""

import re

from .signs import normalize, sign_value

SHAPE = re.compile(r"M{0,3}(CM|CD|D?C{0,3})(XC|XL|L?X{0,3})(IX|IV|V?I{0,3})")


def is_roman(numeral):
    """<<Whether this is a numeral, in either case, blanks around it aside|Check a numeral's form>>."""
    text = normalize(numeral)
    return text != "" and SHAPE.fullmatch(text) is not None


def from_roman(numeral):
    """<<Number that a numeral stands for|Value of a numeral>>; ValueError if it is none."""
    if not is_roman(numeral):
        raise ValueError("not a numeral")
    values = [sign_value(letter) for letter in normalize(numeral)]
    total = 0
    for position, value in enumerate(values):
        if position + 1 < len(values) and value < values[position + 1]:
            total -= value
        else:
            total += value
    return total


def sort_romans(items):
    """<<Numerals from small to large|Order numerals by their value>>, as they were written."""
    return sorted(items, key=from_roman)
''',
    },
    calls={
        "to_roman": lambda r: [r.choice((r.randint(1, 50), r.randint(1, 3999), r.choice((0, 4000, 3999, 1, 3888))))],
        "from_roman": lambda r: [_roman(r)],
        "is_roman": lambda r: [
            r.choice((_roman(r), " " * r.randint(0, 5), r.choice(("IIII", "VV", "IC", "ABC", " x ", "VX"))))
        ],
        "add_romans": lambda r: [[_to_roman(r.randint(1, 400)) for _ in range(r.randint(1, 4))]],
        "next_roman": lambda r: [_to_roman(r.choice((r.randint(1, 60), r.randint(1, 3998), 3999)))],
        "sort_romans": lambda r: [[_roman(r) for _ in range(r.randint(2, 5))]],
    },
    bugs=r"""
nine: (9, "IX"), => (9, "VIV"),
    Numbers with a nine at the end are written oddly.
    The last sign for nine is not the usual one.
upper: return numeral.strip().upper() => return numeral.strip()
    Numerals in small letters are not understood.
    Lower case seems to be no longer accepted.
once: while number >= value:\n            result => if number >= value:\n            result
    Signs that should be repeated come only once.
    Numbers such as three are written with a single sign.
subtract: total -= value\n        else => total += value\n        else
    A small sign before a larger one is added, not subtracted.
    IV is read as six.
last-pair: if position + 1 < len(values) and => if position + 2 < len(values) and
    The last two signs are not seen as a pair.
    Numerals that end in a subtraction such as IX are read wrong.
empty: return text != "" and SHAPE => return SHAPE
    The empty text counts as a numeral.
    Nothing at all, or only blanks, passes as valid.
whole: SHAPE.fullmatch(text) => SHAPE.match(text)
    Garbage after a numeral is not noticed.
    Words that only begin like a numeral are accepted.
by-value: return sorted(items, key=from_roman) => return sorted(items)
    The order is alphabetical rather than by size.
    Sorting puts IX before V.
wrap: 1 if number == LARGEST else number + 1 => number if number == LARGEST else number + 2
    The following numeral skips one.
    Counting upwards leaves every second numeral out.
sum-start: total = 0\n    for item in => total = 1\n    for item in
    Sums of numerals are one too large.
    Adding numerals gives one more than it should.
""",
)


def _units(r: Random, kind: int) -> list[str]:
    units = (("mm", "cm", "m", "km"), ("g", "kg", "t"), ("s", "min", "h", "d"))[kind]
    return [r.choice(units), r.choice((*units, units[0].upper()))]


def _quantity(r: Random) -> str:
    number = r.choice((r.randint(-30, 30), r.randint(1, 99) / 4))
    return f"{number}{r.choice((' ', '', '  '))}{r.choice(('m', 'KM', 'kg', 'G', 'min', 'mile'))}"


UNITS = Library(
    name="units",
    about="<<Conversion of units of length, weight and time|Lengths, weights and times in other units>>",
    names="""
        measures: unitkit quantities; tables: factors constants_mod; convert_mod: conversion exchange
        durations: clock spans_of_time; convert: to_unit converted; kind_of: family_of category
        add_lengths: sum_of_lengths total_length; celsius_to_fahrenheit: to_fahrenheit c_to_f
        fahrenheit_to_celsius: to_celsius f_to_c; parse_quantity: read_quantity quantity_from
        format_duration: duration_text spoken_time; parse_duration: duration_seconds read_duration
        best_unit: natural_unit fitting_unit; amount: size quantity_number
    """,
    files={
        "measures/tables.py": '''"""<<Factors of units|Tables of units>>."""

LENGTHS = {"mm": 1, "cm": 10, "m": 1000, "km": 1000000}
WEIGHTS = {"g": 1, "kg": 1000, "t": 1000000}
TIMES = {"s": 1, "min": 60, "h": 3600, "d": 86400}
KINDS = {"length": LENGTHS, "weight": WEIGHTS, "time": TIMES}


def kind_of(unit):
    """<<Kind of a unit in any case: length, weight or time; None for others|What a unit measures>>."""
    for name, table in KINDS.items():
        if unit.lower() in table:
            return name
    return None
''',
        "measures/convert_mod.py": '''"""<<From unit to unit|Conversions>>."""

import re

from .tables import KINDS, LENGTHS, kind_of


def convert(amount, source, target):
    """<<Amount in another unit of the same kind|Convert an amount>>; ValueError for units of two kinds."""
    kind = kind_of(source)
    if kind is None or kind != kind_of(target):
        raise ValueError("units of two kinds")
    table = KINDS[kind]
    return round(amount * table[source.lower()] / table[target.lower()], 6)


def parse_quantity(text):
    """<<Number and unit of a text such as 2.5 km|Split a text into a number and a unit>>."""
    match = re.fullmatch(r"\\s*(-?\\d+(?:\\.\\d+)?)\\s*([a-zA-Z]+)\\s*", text)
    if match is None or kind_of(match[2]) is None:
        raise ValueError("no quantity")
    return [float(match[1]), match[2].lower()]


def add_lengths(texts, target):
    """<<Sum of lengths in one unit|Add texts such as 3 cm, and give the sum in a unit>>."""
    total = 0
    for item in texts:
        amount, unit = parse_quantity(item)
        total += convert(amount, unit, target)
    return round(total, 6)


def best_unit(millimetres):
    """<<Largest unit of length in which the amount is at least 1, mm if there is none|Unit that suits a length>>."""
    best = "mm"
    for name, factor in LENGTHS.items():
        if millimetres >= factor:
            best = name
    return best


def celsius_to_fahrenheit(degrees):
    """<<Fahrenheit for Celsius, to one digit|Convert Celsius>>."""
    return round(degrees * 9 / 5 + 32, 1)


def fahrenheit_to_celsius(degrees):
    """<<Celsius for Fahrenheit, to one digit|Convert Fahrenheit>>."""
    return round((degrees - 32) * 5 / 9, 1)
''',
        "measures/durations.py": '''"""<<Durations as text|Texts such as 1h 5min>>."""

import re

from .tables import TIMES


def format_duration(seconds):
    """<<Text such as 1d 2h 5min 3s, without parts that are 0; 0s for none|Duration as text, large units first>>."""
    parts = []
    for unit, factor in sorted(TIMES.items(), key=lambda pair: -pair[1]):
        count, seconds = divmod(seconds, factor)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts) or "0s"


def parse_duration(text):
    """<<Seconds of a text such as 1h 5min|Read a duration>>."""
    return sum(int(count) * TIMES[unit] for count, unit in re.findall(r"(\\d+)\\s*(min|s|h|d)", text))
''',
    },
    calls={
        "kind_of": lambda r: [r.choice(("mm", "cm", "m", "KM", "Kg", "t", "g", "H", "min", "d", "mile", "s", "xy"))],
        "convert": lambda r: [r.randint(1, 5000), *r.choice((_units(r, 0), _units(r, 1), _units(r, 2), ["m", "g"]))],
        "parse_quantity": lambda r: [_quantity(r)],
        "add_lengths": lambda r: [[f"{r.randint(1, 90)} {r.choice(('cm', 'm'))}" for _ in range(3)], _units(r, 0)[0]],
        "best_unit": lambda r: [r.choice((1, 9, 10, 11, 999, 1000, 1500, 1000000, 2000000, r.randint(1, 5000)))],
        "celsius_to_fahrenheit": lambda r: [r.randint(-40, 120)],
        "fahrenheit_to_celsius": lambda r: [r.randint(-40, 220)],
        "format_duration": lambda r: [r.choice((0, 59, 60, 3600, 86400, r.randint(1, 400), r.randint(1, 200000)))],
        "parse_duration": lambda r: [f"{r.randint(1, 9)}{r.choice('dh')} {r.randint(1, 59)}{r.choice(('min', 's'))}"],
    },
    bugs=r"""
day: "d": 86400} => "d": 84600}
    Days have the wrong length.
    Two digits of a day's seconds seem to be swapped.
case: if unit.lower() in table: => if unit in table:
    Units in capitals are not known.
    KM and Kg are rejected.
two-kinds: if kind is None or kind != kind_of(target): => if kind is None or kind == kind_of(target):
    Ordinary conversions are refused.
    It says that two units of one kind are of two kinds.
inverse: table[source.lower()] / table[target.lower()] => table[target.lower()] / table[source.lower()]
    Conversions go the wrong way: small units give small numbers.
    Converting metres to kilometres multiplies by a thousand.
negative: *(-? => *(
    Negative amounts cannot be read.
    A minus sign before a number is not accepted.
lower-unit: return [float(match[1]), match[2].lower()] => return [float(match[1]), match[2]]
    The unit that comes back is not in small letters.
    Units are read with whatever case they had, unlike before.
sum-units: total += convert(amount, unit, target) => total += convert(amount, target, unit)
    Sums of mixed lengths are far off.
    Adding lengths in different units does not work.
fahrenheit: round(degrees * 9 / 5 + 32, 1) => round((degrees + 32) * 9 / 5, 1)
    The freezing point of water is not at 32 degrees.
    Fahrenheit values are too high.
celsius: round((degrees - 32) * 5 / 9, 1) => round(degrees - 32 * 5 / 9, 1)
    Celsius values are too high for hot days.
    Fahrenheit is hardly converted at all.
order: key=lambda pair: -pair[1] => key=lambda pair: pair[1]
    Durations are all given in seconds.
    Long durations are never split into hours and minutes.
""",
)


def _written(r: Random) -> list:
    base = r.choice((2, 3, 16, 16))
    text = "".join(r.choices("0123456789abcdef"[:base], k=r.randint(1, 4)))
    text = r.choice(("", "", "-")) + r.choice((text, text.upper(), f"{text}_{r.randint(0, 1)}"))
    return [r.choice((text, text, text, "2g")), base]


RADIX = Library(
    name="radix",
    about="<<Whole numbers in other number systems|Digits of numbers in bases from 2 to 16>>",
    names="""
        bases: radixes number_systems; digits_mod: places_mod figures; checks: codes checksums
        to_digits: digits_of split_digits; from_digits: number_of join_digits; to_base: in_base write_base
        from_base: parse_base read_base; digit_sum: cross_sum sum_of_digits
        is_palindrome: reads_both_ways is_mirrored; group_digits: grouped in_blocks
        luhn_valid: card_valid checksum_ok; gray_code: reflected_code gray; number: value figure; base: radix system
    """,
    files={
        "bases/digits_mod.py": '''"""<<Digits of a number and back|Numbers as digits>>."""

LETTERS = "0123456789abcdef"


def to_digits(number, base):
    """<<Digits of a number from 0 up, the highest first|List of digits>>."""
    if number == 0:
        return [0]
    result = []
    while number > 0:
        number, digit = divmod(number, base)
        result.append(digit)
    return result[::-1]


def from_digits(digits, base):
    """<<Number of which these are the digits|Put digits together>>."""
    total = 0
    for digit in digits:
        total = total * base + digit
    return total


def to_base(number, base):
    """<<Text of a number, with a minus sign if it is negative|Write a number in a base>>."""
    if base < 2 or base > 16:
        raise ValueError("base out of range")
    sign = "-" if number < 0 else ""
    return sign + "".join(LETTERS[digit] for digit in to_digits(abs(number), base))


def from_base(text, base):
    """<<Number of a text, in either case; underscores are left out|Read a number>>; ValueError for a wrong digit."""
    clean = text.lower().replace("_", "")
    negative = clean.startswith("-")
    digits = [LETTERS.find(letter) for letter in clean.lstrip("-")]
    if any(digit < 0 or digit >= base for digit in digits):
        raise ValueError("wrong digit")
    number = from_digits(digits, base)
    return -number if negative else number
''',
        "bases/checks.py": '''"""<<Properties of digits|Sums, groups and check digits>>."""

from .digits_mod import to_base, to_digits


def digit_sum(number, base=10, until_one=False):
    """<<Sum of the digits; repeated until one digit is left, if so wanted|Sum of a number's digits>>."""
    total = sum(to_digits(number, base))
    while until_one and total >= base:
        total = sum(to_digits(total, base))
    return total


def is_palindrome(number, base=10):
    """<<Whether the digits are the same from both ends|Check for a palindrome>>."""
    digits = to_digits(number, base)
    return digits == digits[::-1]


def group_digits(number, size=3):
    """<<Decimal text with an underscore between groups, counted from the right|Text with digits in groups>>."""
    text = to_base(number, 10)
    groups = []
    while len(text) > size:
        groups.insert(0, text[-size:])
        text = text[:-size]
    return "_".join([text] + groups)


def luhn_valid(digits):
    """<<Whether a text of digits has a right check digit at its end, by Luhn's rule|Luhn check>>."""
    total = 0
    for position, letter in enumerate(reversed(digits)):
        digit = int(letter)
        if position % 2 == 1:
            digit = digit * 2
            if digit > 9:
                digit -= 9
        total += digit
    return total % 10 == 0


def gray_code(bits):
    """<<Texts of the Gray code with that many bits|Sequence of texts that differ in one place each>>."""
    if bits == 0:
        return [""]
    shorter = gray_code(bits - 1)
    return ["0" + item for item in shorter] + ["1" + item for item in reversed(shorter)]
''',
    },
    calls={
        "to_digits": lambda r: [r.choice((0, r.randint(0, 300))), r.choice((2, 3, 8, 10, 16))],
        "from_digits": lambda r: [[r.randint(0, 1) for _ in range(r.randint(0, 6))], r.choice((2, 3, 8, 10))],
        "to_base": lambda r: [r.randint(-300, 300), r.choice((2, 3, 10, 16, 16, 1, 17))],
        "from_base": _written,
        "digit_sum": lambda r: [r.randint(0, 9999), r.choice((2, 10, 10)), r.choice((True, False))],
        "is_palindrome": lambda r: [r.choice((7, 11, 121, 1221, 123, 10, 9, 5, r.randint(1, 99))), r.choice((2, 10))],
        "group_digits": lambda r: [r.choice((r.randint(0, 999), r.randint(1000, 99999999))), r.choice((2, 3, 4))],
        "luhn_valid": lambda r: [
            r.choice(("18", "26", "34", "59", "91", "67", "79927398713", str(r.randint(10, 9999))))
        ],
        "gray_code": lambda r: [r.randint(0, 4)],
    },
    bugs=r"""
zero: if number == 0:\n        return [0] => if number == 0:\n        return []
    Zero has no digits.
    The number zero becomes an empty list or text.
direction: return result[::-1] => return result
    Digits come with the lowest first.
    Numbers are written backwards.
join: total = total * base + digit => total = total * 10 + digit
    Digits are put together as if the base were ten.
    Numbers in any base other than ten are read wrong.
range: if base < 2 or base > 16: => if base < 2 or base >= 16:
    Base sixteen is refused.
    Hexadecimal numbers cannot be written.
underscore: clean = text.lower().replace("_", "") => clean = text.lower().replace("_", "0")
    An underscore counts as a zero.
    Numbers with underscores are read too large.
negative: return -number if negative else number => return number
    Negative texts are read as positive numbers.
    The sign is ignored when a number is read.
once: while until_one and total >= base: => while until_one and total > base:
    Repeated sums stop one step too early when they reach the base.
    The last repeated sum can have two digits.
groups: groups.insert(0, text[-size:]) => groups.append(text[-size:])
    Groups come in the wrong order.
    Large numbers have their groups of digits mixed up.
luhn: if position % 2 == 1: => if position % 2 == 0:
    Valid numbers fail the check.
    Every other digit is doubled, but the wrong ones.
gray: ["1" + item for item in reversed(shorter)] => ["1" + item for item in shorter]
    Neighbours in the code differ in more than one place.
    The second half of the Gray code runs in the wrong direction.
""",
)

LIBRARIES = [ROMAN, UNITS, RADIX]
