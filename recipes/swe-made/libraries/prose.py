"""Libraries on text: wrapping, similarity of words, templates."""

from random import Random

from repository import Library

_WORDS = ("a", "an", "the", "sea", "river", "mountain", "of", "green", "to", "walk", "extraordinary", "ship", "in")


def _text(r: Random, most: int = 9) -> str:
    return " ".join(r.choices(_WORDS, k=r.randint(1, most)))


WRAPPING = Library(
    name="text-wrap",
    about="<<Layout of plain text in columns|Wrapping, alignment and trimming of text>>",
    names="""
        textlayout: typeset plainlayout; lines_mod: wrapping paragraphs; align_mod: columns alignment
        wrap: wrap_words fold_text; longest_line: widest text_width; indent_lines: indented shift_right
        truncate: shortened cut_off; align: padded justified; column_text: columns_of render_columns
        title_case: titled capitalize_words; count_words: word_count num_words; bullet_list: bullets as_list
        width: line_width limit; lines: rows_of_text text_lines
    """,
    files={
        "textlayout/lines_mod.py": '''"""<<Lines of a text|Breaking text into lines>>."""

ELLIPSIS = "<<...|~|..>>"


def wrap(text, width):
    """<<Lines of at most that many characters; a longer word has a line to itself|Break a text at blanks>>."""
    lines = []
    current = ""
    for word in text.split():
        if not current:
            current = word
        elif len(current) + 1 + len(word) <= width:
            current += " " + word
        else:
            lines.append(current)
            current = word
    if current:
        lines.append(current)
    return lines


def longest_line(text):
    """<<Length of the longest line, 0 without text|Width of a text>>, blanks at line ends aside."""
    return max((len(line.rstrip()) for line in text.split("\\n")), default=0)


def indent_lines(text, depth, first=True):
    """<<Text with blanks before each line that is not empty|Indent a text>>; the first line only if so wanted."""
    result = []
    for number, line in enumerate(text.split("\\n")):
        skip = line == "" or (number == 0 and not first)
        result.append(line if skip else " " * depth + line)
    return "\\n".join(result)


def truncate(text, width):
    """<<Text of at most that many characters, the mark of what is missing included|Cut a text that is too long>>."""
    if len(text) <= width:
        return text
    return text[: width - len(ELLIPSIS)] + ELLIPSIS


def count_words(text):
    """<<Count of each word, small letters, without punctuation at its ends|How often words occur>>."""
    result = {}
    for word in text.split():
        key = word.strip(".,;:!?").lower()
        if key:
            result[key] = result.get(key, 0) + 1
    return result
''',
        "textlayout/align_mod.py": '''"""<<Columns and lists|Alignment>>."""

from .lines_mod import indent_lines, wrap

SMALL = ("a", "an", "the", "of", "in", "to")


def align(text, width, side):
    """<<Text padded with blanks on the left, on the right, or on both sides|Pad a text>>; odd blanks go right."""
    blanks = max(0, width - len(text))
    if side == "right":
        return " " * blanks + text
    if side == "center":
        return " " * (blanks // 2) + text + " " * (blanks - blanks // 2)
    return text + " " * blanks


def column_text(rows, gap=2):
    """<<Lines of rows whose cells stand in columns, without blanks at the ends|Table as text>>."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [align(cell, width, "left") for cell, width in zip(row, widths)]
        lines.append((" " * gap).join(cells).rstrip())
    return lines


def title_case(text):
    """<<Words with capitals, small words in the middle aside|Capitalize as titles are>>."""
    words = text.lower().split()
    result = []
    for position, word in enumerate(words):
        edge = position in (0, len(words) - 1)
        result.append(word if word in SMALL and not edge else word.capitalize())
    return " ".join(result)


def bullet_list(items, width):
    """<<Items wrapped to a width, a dash before each and further lines indented|List with dashes>>."""
    lines = []
    for item in items:
        body = "\\n".join(wrap(item, width - 2))
        lines.append("- " + indent_lines(body, 2, first=False))
    return "\\n".join(lines)
''',
    },
    calls={
        "wrap": lambda r: [_text(r), r.randint(5, 16)],
        "longest_line": lambda r: ["\n".join(_text(r, 3) + " " * r.randint(0, 2) for _ in range(3))],
        "indent_lines": lambda r: ["\n\n".join(_text(r, 2) for _ in range(2)), r.randint(1, 4), r.random() < 0.5],
        "truncate": lambda r: [_text(r, 5), r.randint(5, 20)],
        "count_words": lambda r: [r.choice(("The ", "", "Sea, ")) + _text(r) + r.choice((".", "!", " , the?"))],
        "align": lambda r: [_text(r, 2), r.randint(6, 16), r.choice(("left", "right", "center"))],
        "column_text": lambda r: [[r.choices(_WORDS, k=3) for _ in range(2)], r.randint(1, 3)],
        "title_case": lambda r: [r.choice((_text(r, 5), _text(r, 5).upper()))],
        "bullet_list": lambda r: [[_text(r, 5) for _ in range(2)], r.randint(10, 18)],
    },
    bugs=r"""
exact-fit: len(current) + 1 + len(word) <= width: => len(current) + 1 + len(word) < width:
    A word that would just fit goes to the next line.
    Lines never use their full width.
blank: len(current) + 1 + len(word) <= width: => len(current) + len(word) <= width:
    Some lines are one character too long.
    The blank between words is not counted when lines are broken.
last-line: if current:\n        lines => if not lines:\n        lines
    The end of a text is lost when it is wrapped.
    Wrapped text lacks its last line.
empty-lines: skip = line == "" or (number == 0 and not first) => skip = number == 0 and not first
    Empty lines get blanks when a text is indented.
    Indenting leaves trailing blanks on empty lines.
too-long: text[: width - len(ELLIPSIS)] + ELLIPSIS => text[:width] + ELLIPSIS
    Texts that are cut come out longer than allowed.
    The mark of what is missing is not counted in the width.
word-case: key = word.strip(".,;:!?").lower() => key = word.strip(".,;:!?")
    The same word with a capital is counted on its own.
    Words at the beginning of a sentence are not added to the others.
right: return " " * blanks + text\n => return text + " " * blanks\n
    Text is not moved to the right.
    Right alignment does the same as left alignment.
dash: wrap(item, width - 2) => wrap(item, width)
    Items of lists are wider than they should be.
    The dash is not counted in the width of a list.
edge: edge = position in (0, len(words) - 1) => edge = position == 0
    Small words at the end of a title are left small.
    The last word of a title has no capital if it is a short one.
first-line: (number == 0 and not first) => (number == 0 and first)
    The first line is indented exactly when it should not be.
    The option for the first line has the opposite effect.
""",
)

_PAIRS = ("kitten", "sitting", "flaw", "lawn", "night", "nacht", "Karolin", "kathrin", "abc", "acb", "", "ab", "Listen")


def _pair(r: Random) -> list[str]:
    word = r.choice(_PAIRS)
    letters = list(word)
    r.shuffle(letters)
    return [word, r.choice((r.choice(_PAIRS), "".join(letters), word[1:] + word[:1], word + "s"))]


SIMILARITY = Library(
    name="similarity",
    about="<<Distances between words|Measures of how alike two words are>>",
    names="""
        wordmatch: likeness nearwords; distances: edits counting_mod; search_mod: lookup matching
        edit_distance: levenshtein num_edits; hamming: mismatches num_differences
        common_prefix: shared_start same_beginning; longest_common: common_subsequence lcs_length
        bigrams: letter_pairs two_grams; dice: pair_similarity overlap_share; is_anagram: same_letters rearranged
        closest: nearest_words best_matches; suggest: did_you_mean propose; first: one left_word
        second: other right_word
    """,
    files={
        "wordmatch/distances.py": '''"""<<Distances by position|Edits and differences>>."""


def edit_distance(first, second):
    """<<Fewest letters to insert, delete or replace|Levenshtein distance>>."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        above, row = row, [i]
        for j, b in enumerate(second, 1):
            change = above[j - 1] + (0 if a == b else 1)
            row.append(min(above[j] + 1, row[j - 1] + 1, change))
    return row[-1]


def hamming(first, second):
    """<<Number of positions that differ; what one word has more counts too|Positions with different letters>>."""
    differing = sum(a != b for a, b in zip(first, second))
    return differing + abs(len(first) - len(second))


def common_prefix(words):
    """<<Longest beginning that all words share|What all words begin with>>."""
    if not words:
        return ""
    shortest = min(words, key=len)
    for position, letter in enumerate(shortest):
        if any(word[position] != letter for word in words):
            return shortest[:position]
    return shortest


def longest_common(first, second):
    """<<Length of the longest common subsequence|Most letters that both have in the same order>>."""
    row = [0] * (len(second) + 1)
    for a in first:
        above, row = row, [0]
        for j, b in enumerate(second, 1):
            row.append(above[j - 1] + 1 if a == b else max(above[j], row[j - 1]))
    return row[-1]
''',
        "wordmatch/search_mod.py": '''"""<<Sets of letters, and searching|Finding similar words>>."""

from .distances import common_prefix, edit_distance


def bigrams(word):
    """<<Pairs of neighbouring letters, small ones|List of all two-letter parts>>."""
    small = word.lower()
    return [small[at : at + 2] for at in range(len(small) - 1)]


def dice(first, second):
    """<<Twice the common pairs by all pairs, to three digits; 0 without pairs|Dice coefficient of letter pairs>>."""
    a = bigrams(first)
    b = bigrams(second)
    if not a or not b:
        return 0.0
    rest = list(b)
    common = 0
    for item in a:
        if item in rest:
            rest.remove(item)
            common += 1
    return round(2 * common / (len(a) + len(b)), 3)


def is_anagram(first, second):
    """<<Whether both have the same letters, in either case and any order|Check for an anagram>>."""
    return sorted(first.lower()) == sorted(second.lower())


def closest(word, candidates):
    """<<Candidates with the smallest distance, in alphabetical order|All nearest candidates, sorted>>."""
    distances_found = {item: edit_distance(word, item) for item in candidates}
    least = min(distances_found.values(), default=0)
    return sorted(item for item, distance in distances_found.items() if distance == least)


def suggest(word, candidates, most=2):
    """<<Candidates at most that far away, nearest first, then by longer common beginning|Suggestions for a word>>."""
    near = [item for item in candidates if edit_distance(word, item) <= most]
    return sorted(near, key=lambda item: (edit_distance(word, item), -len(common_prefix([word, item])), item))
''',
    },
    calls={
        "edit_distance": _pair,
        "hamming": _pair,
        "common_prefix": lambda r: [
            [r.choice(("inter", "in", "i")) + r.choice(_PAIRS) for _ in range(r.randint(0, 3))]
        ],
        "longest_common": _pair,
        "bigrams": lambda r: [r.choice(_PAIRS) + r.choice(("", "a", "AB", "Xy", "o"))],
        "dice": lambda r: r.choice(
            (_pair(r), ["banana", r.choice(("ananas", "nana", "ana"))], ["aaa", "a" * r.randint(1, 6)])
        ),
        "is_anagram": _pair,
        "closest": lambda r: [r.choice(("cat", "house", "tree")), _candidates(r)],
        "suggest": lambda r: [r.choice(("cat", "house", "tree")), _candidates(r), r.randint(1, 3)],
    },
    bugs=r"""
insert: row.append(min(above[j] + 1, row[j - 1] + 1, change)) => row.append(min(above[j] + 1, change))
    Words that need an inserted letter have too large a distance.
    A longer second word gives wrong distances.
cut: return shortest[:position] => return shortest[: position + 1]
    The common beginning has a letter too many.
    A letter that not all words share is part of what they share.
last-pair: for at in range(len(small) - 1)] => for at in range(len(small) - 2)]
    The last pair of letters is missing.
    Pairs of a word of two letters are an empty list.
pair-case: small = word.lower() => small = word
    Words that differ only in case have no pairs in common.
    Capitals are kept in pairs of letters.
dice-factor: round(2 * common / ( => round(common / (
    A word is only half as similar to itself as it should be.
    Similarities never exceed one half.
ties: if distance == least) => if distance == least)[:1]
    Only one candidate is given where several are equally near.
    Ties are lost.
bound: if edit_distance(word, item) <= most] => if edit_distance(word, item) < most]
    Candidates at just the allowed distance are missing.
    Suggestions leave out what is exactly as far as allowed.
lengths: return differing + abs(len(first) - len(second)) => return differing
    Extra letters at the end are not counted.
    Words of unequal length seem to be the same.
first-column: above, row = row, [i] => above, row = row, [1]
    The distance comes out too small for some pairs of words.
    Deleting several letters at the start costs only one.
multiset: rest.remove(item)\n            common => common
    Repeated pairs count too often.
    Words with many equal pairs have a similarity above one.
""",
)


def _candidates(r: Random) -> list[str]:
    words = ("cat", "cut", "cart", "bat", "house", "mouse", "horse", "hose", "tree", "three", "free", "trees", "at")
    return r.sample(words, r.randint(3, 6))


def _template(r: Random) -> str:
    parts = (
        "Dear {{name}}",
        "{{ name }}",
        "{{city|upper}}",
        "{{missing}}",
        "sum {{count}}",
        "{{name|lower|trim}}",
        " and ",
    )
    return "".join(r.choices(parts, k=r.randint(1, 4)))


def _values(r: Random) -> dict:
    return {"name": r.choice(("Ann", " Bo ", "Cy")), "city": r.choice(("Rome", "oslo")), "count": r.randint(0, 3)}


TEMPLATES = Library(
    name="templates",
    about="<<Templates with names in double braces|Rendering of small text templates>>",
    names="""
        fillin: stencil mailmerge; filters_mod: pipes transforms; engine: renderer filling; render: fill_in fill
        variables: names_in placeholders; apply_filter: run_filter through_filter; escape_html: escaped html_safe
        lookup: find_value resolve; render_each: repeat_template render_rows; pluralize: plural counted_noun
        shorten: clipped excerpt; template: pattern source_text; values: context data
    """,
    files={
        "fillin/filters_mod.py": r'''"""<<Filters of values|What may follow a name>>."""


def escape_html(text):
    """<<Text with the four special characters of HTML replaced|Make text safe for HTML>>."""
    for sign, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("\"", "&quot;")):
        text = text.replace(sign, entity)
    return text


def apply_filter(name, text):
    """<<Text after a filter: upper, lower, trim, title or escape|Apply a filter>>; ValueError for others."""
    if name == "upper":
        return text.upper()
    if name == "lower":
        return text.lower()
    if name == "trim":
        return text.strip()
    if name == "title":
        return text.title()
    if name == "escape":
        return escape_html(text)
    raise ValueError("unknown filter")


def pluralize(count, one, many=None):
    """<<Number and noun: many, or one with an s, unless there is exactly one|Count with the right noun>>."""
    noun = one if count == 1 else (many or one + "s")
    return f"{count} {noun}"


def shorten(text, most):
    """<<First words of a text, and three dots where words are missing|At most so many words>>."""
    words = text.split()
    if len(words) <= most:
        return " ".join(words)
    return " ".join(words[:most]) + "..."
''',
        "fillin/engine.py": r'''"""<<Rendering|The engine>>."""

import re

from .filters_mod import apply_filter

HOLE = re.compile(r"\{\{\s*([\w.]+)((?:\|\w+)*)\s*\}\}")


def lookup(values, path, default=""):
    """<<Value at a path such as user.name, or the default|Find a value in nested dicts>>."""
    current = values
    for part in path.split("."):
        if not isinstance(current, dict) or part not in current:
            return default
        current = current[part]
    return default if current is None else current


def render(template, values, default=""):
    """<<Template with values in place of names; filters from left to right|Fill a template>>."""

    def replace_hole(match):
        text = str(lookup(values, match[1], default))
        for name in match[2].split("|")[1:]:
            text = apply_filter(name, text)
        return text

    return HOLE.sub(replace_hole, template)


def variables(template):
    """<<Names in a template, each once, in the order of their first use|Which names a template needs>>."""
    result = []
    for match in HOLE.finditer(template):
        if match[1] not in result:
            result.append(match[1])
    return result


def render_each(template, rows, separator=", "):
    """<<Template rendered for each row, with a number from 1 as "number"|Render rows and join them>>."""
    parts = []
    for number, row in enumerate(rows, start=1):
        parts.append(render(template, {**row, "number": number}))
    return separator.join(parts)
''',
    },
    calls={
        "escape_html": lambda r: ["".join(r.choices(("a", "&", "<", ">", '"', "b", "&lt;"), k=r.randint(1, 5)))],
        "apply_filter": lambda r: [
            r.choice(("upper", "lower", "trim", "title", "escape", "other")),
            r.choice((" Ab c ", "x<y", "the end", "ONE two ")),
        ],
        "pluralize": lambda r: [
            r.randint(0, 4),
            *r.choice((["day"], ["child", "children"], ["box", "boxes"], ["cat"])),
        ],
        "shorten": lambda r: [_text(r, 6), r.randint(1, 5)],
        "lookup": lambda r: [
            {"user": {"name": r.choice(("Ann", None)), "age": r.randint(0, 3)}, "x": r.choice((None, 0, 5, ""))},
            r.choice(("user.name", "user.age", "x", "y", "x.y", "user.name.z")),
            r.choice(("?", "none", "-")),
        ],
        "render": lambda r: [_template(r), _values(r), r.choice(("", "?", "n/a"))],
        "variables": lambda r: [_template(r)],
        "render_each": lambda r: [
            r.choice(("{{number}}. {{name}}", "{{name}}", "{{city|title}} {{number}}")),
            [_values(r) for _ in range(r.randint(0, 3))],
            r.choice(("; ", ", ")),
        ],
    },
    bugs=r"""
ampersand: (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), => (("<", "&lt;"), ("&", "&amp;"), (">", "&gt;"),
    Some entities are escaped twice.
    A less-than sign is shown as an entity on the page.
trim: return text.strip() => return text.lstrip()
    Trimmed values keep blanks at their end.
    The trim filter works on one side only.
falsy: return default if current is None else current => return current or default
    A value of zero is taken for a missing one.
    Zero and empty values are replaced by the default.
default: str(lookup(values, match[1], default)) => str(lookup(values, match[1]))
    Missing names are always empty.
    The default for missing names is not respected.
greater: (">", "&gt;") => (">", "&lt;")
    Greater-than signs are shown as less-than signs.
    Closing brackets of tags are replaced by the wrong entity.
zero: one if count == 1 else => one if count <= 1 else
    Zero takes the singular.
    Counts of none have the wrong noun.
once: if match[1] not in result: => if match[1] != (result or [None])[-1]:
    Names are listed more than once.
    A name that comes again later is repeated in the list of names.
words-kept: " ".join(words[:most]) + "..." => " ".join(words[: most - 1]) + "..."
    Cut texts have a word less than allowed.
    One word too many is removed.
number: for number, row in enumerate(rows, start=1): => for number, row in enumerate(rows):
    Numbers of rows begin at zero.
    The first row has number 0.
many: (many or one + "s") => (one + "s")
    Irregular plurals are ignored.
    The plural that I give is not used.
""",
)

LIBRARIES = [WRAPPING, SIMILARITY, TEMPLATES]
