"""Libraries for sequences: intervals, run-length coding, a prefix tree."""

from random import Random

from repository import Library


def _spans(r: Random, most: int = 5) -> list:
    starts = [r.randint(0, 15) for _ in range(r.randint(1, most))]
    return [[start, start + r.randint(0, 4)] for start in starts]


INTERVALS = Library(
    name="intervals",
    about="<<Closed intervals of whole numbers|Arithmetic on lists of closed ranges>>",
    names="""
        spankit: rangelist segments; merge_mod: union_mod joining_mod; query_mod: lookup_mod measures_mod
        merge_overlapping: join_ranges coalesce; intersect: common_parts shared_ranges
        subtract: without difference_of; gaps_between: holes missing_ranges; covers: contains_all is_covered
        total_length: count_numbers size_of_all; most_overlaps: deepest_overlap busiest; clip: cut_to limited
        to_text: range_text as_text; spans: ranges intervals_given; low: begin_at left_end; high: end_at right_end
    """,
    files={
        "spankit/merge_mod.py": '''"""<<Unions, intersections and differences|Set operations>> of closed spans."""


def merge_overlapping(spans):
    """<<Fewest spans with the same numbers, in order; neighbours such as 1-2 and 3-4 are joined|Merge spans>>."""
    result = []
    for low, high in sorted(spans):
        if result and low <= result[-1][1] + 1:
            result[-1][1] = max(result[-1][1], high)
        else:
            result.append([low, high])
    return result


def intersect(one, other):
    """<<Spans of the numbers that are in both lists|Intersection>>, in order."""
    result = []
    for low, high in merge_overlapping(one):
        for begin, end in merge_overlapping(other):
            start, stop = max(low, begin), min(high, end)
            if start <= stop:
                result.append([start, stop])
    return result


def gaps_between(spans):
    """<<Spans of numbers between the first and the last that are in none|Find gaps>>."""
    merged = merge_overlapping(spans)
    return [[left[1] + 1, right[0] - 1] for left, right in zip(merged, merged[1:])]


def subtract(one, other):
    """<<Spans of the numbers that are in the first list alone|Difference>>, in order."""
    result = []
    for low, high in merge_overlapping(one):
        start = low
        for begin, end in merge_overlapping(other):
            if end < start or begin > high:
                continue
            if begin > start:
                result.append([start, begin - 1])
            start = end + 1
        if start <= high:
            result.append([start, high])
    return result


def clip(spans, lowest, highest):
    """<<Parts of spans inside of bounds; empty ones are left out|Cut spans to bounds>>."""
    cut = [[max(low, lowest), min(high, highest)] for low, high in spans]
    return [span for span in cut if span[0] <= span[1]]
''',
        "spankit/query_mod.py": '''"""<<Questions about spans|Measures>>."""

from .merge_mod import merge_overlapping, subtract


def total_length(spans):
    """<<How many numbers are in at least one span|Count numbers>>."""
    return sum(high - low + 1 for low, high in merge_overlapping(spans))


def covers(spans, wanted):
    """<<Whether each number of the wanted spans is in some span|Check for full cover>>."""
    return subtract(wanted, spans) == []


def most_overlaps(spans):
    """<<Largest number of spans that share a number|Depth of spans>>."""
    return max((sum(low <= start <= high for low, high in spans) for start, _ in spans), default=0)


def to_text(spans):
    """<<Text such as 1-3, 5|Write merged spans>>; a single number stands alone."""
    parts = []
    for low, high in merge_overlapping(spans):
        parts.append(str(low) if low == high else f"{low}-{high}")
    return ", ".join(parts)
''',
    },
    calls={
        "merge_overlapping": lambda r: [_spans(r)],
        "intersect": lambda r: [_spans(r, 3), _spans(r, 3)],
        "gaps_between": lambda r: [_spans(r)],
        "subtract": lambda r: [_spans(r, 3), _spans(r, 3)],
        "clip": lambda r: [_spans(r), r.randint(0, 6), r.randint(7, 14)],
        "total_length": lambda r: [_spans(r)],
        "covers": lambda r: [_spans(r), [[low, low + r.randint(0, 1)] for low in r.sample(range(4, 12), 1)]],
        "most_overlaps": lambda r: [_spans(r)],
        "to_text": lambda r: [_spans(r)],
    },
    bugs=r"""
neighbours: if result and low <= result[-1][1] + 1: => if result and low <= result[-1][1]:
    Neighbouring spans are not joined.
    Spans that follow each other directly stay apart.
contained: result[-1][1] = max(result[-1][1], high) => result[-1][1] = high
    A span inside another one makes this shorter.
    Merging loses the end of a long span.
unsorted: for low, high in sorted(spans): => for low, high in spans:
    Merging depends on the order of the spans.
    Spans that are not in order are not merged.
single: if start <= stop: => if start < stop:
    A single common number is missing.
    Spans that share just their ends have nothing in common.
gap-start: [[left[1] + 1, right[0] - 1] for => [[left[1], right[0] - 1] for
    Gaps begin with the end of the span before.
    A gap contains a number that is in a span.
cut-end: result.append([start, begin - 1]) => result.append([start, begin])
    What is left contains a number that was taken away.
    Taking spans away leaves their first number.
rest: if start <= high:\n            result => if start < high:\n            result
    A single number at the end of the rest is lost.
    The last number is missing from what is left.
length: sum(high - low + 1 for => sum(high - low for
    Spans count one number too few.
    A span of a single number has no length.
double: sum(high - low + 1 for low, high in merge_overlapping(spans)) => sum(high - low + 1 for low, high in spans)
    Numbers in two spans are counted twice.
    Overlapping spans have too large a total.
depth: sum(low <= start <= high for => sum(low < start <= high for
    Spans that begin together do not count as overlapping.
    The number of spans at one place is too small.
alone: str(low) if low == high else => str(low) if low == high + 1 else
    Single numbers are written as a range from a number to itself.
    A number alone comes out with a dash.
""",
)


def _runs(r: Random) -> str:
    return "".join(r.choice("abc ") * r.choice((1, 1, 2, 3, 11)) for _ in range(r.randint(1, 4)))


RUNS = Library(
    name="run-length",
    about="<<Run-length coding of texts and lists|Compression of repeated characters>>",
    names="""
        repeats: runcoder packbits; text_mod: letters_mod strings_mod; list_mod: values_mod sequences_mod
        encode: compress packed; decode: expand_text unpacked; runs_of: find_runs split_runs
        longest_run: longest_repeat widest_run; delta_encode: differences to_deltas
        delta_decode: from_deltas undo_deltas; squeeze: collapse_repeats drop_repeats
        mask_encode: bits_to_runs pack_mask; mask_decode: runs_to_bits unpack_mask; text: message content
    """,
    files={
        "repeats/text_mod.py": '''"""<<Texts|Coding of texts>>; a run of one has no number."""

LONGEST = <<9|8|7>>


def runs_of(text):
    """<<Lists of a character and how often it follows itself|Runs of a text>>."""
    runs = []
    for letter in text:
        if runs and runs[-1][0] == letter:
            runs[-1][1] += 1
        else:
            runs.append([letter, 1])
    return runs


def encode(text):
    """<<Each run as its number and its character; long runs come in parts|Encode a text without digits>>."""
    parts = []
    for letter, count in runs_of(text):
        while count > LONGEST:
            parts.append(f"{LONGEST}{letter}")
            count -= LONGEST
        parts.append(letter if count == 1 else f"{count}{letter}")
    return "".join(parts)


def decode(text):
    """<<Text of an encoded one; numbers may have several digits|Decode a text>>."""
    result = ""
    number = ""
    for letter in text:
        if letter.isdigit():
            number += letter
        else:
            result += letter * int(number or 1)
            number = ""
    return result


def longest_run(text):
    """<<Character and length of the longest run, the first of equals|Longest run>>; None without text."""
    best = None
    for run in runs_of(text):
        if best is None or run[1] > best[1]:
            best = run
    return best


def squeeze(text, most=1):
    """<<Text in which no character follows itself more often than allowed|Shorten runs>>."""
    return "".join(letter * min(count, most) for letter, count in runs_of(text))
''',
        "repeats/list_mod.py": '''"""<<Lists of numbers and bits|Coding of lists>>."""


def delta_encode(values):
    """<<First value, then differences|Differences of neighbours>>."""
    return [value - before for before, value in zip([0] + values, values)]


def delta_decode(deltas):
    """<<Values of differences|Undo differences>>."""
    values = []
    total = 0
    for delta in deltas:
        total += delta
        values.append(total)
    return values


def mask_encode(bits):
    """<<Lengths of runs of zeros and ones in turn, zeros first|Runs of bits>>; the first may be 0."""
    lengths = []
    expected = 0
    count = 0
    for bit in bits:
        if bit != expected:
            lengths.append(count)
            count = 0
            expected = bit
        count += 1
    return lengths + [count]


def mask_decode(lengths):
    """<<Bits of lengths of runs|Undo the coding of bits>>."""
    bits = []
    for position, length in enumerate(lengths):
        bits += [position % 2] * length
    return bits
''',
    },
    calls={
        "runs_of": lambda r: [_runs(r)],
        "encode": lambda r: [_runs(r)],
        "decode": lambda r: ["".join(r.choice(("a", "b", "3c", "12d", "2 ", "10e")) for _ in range(r.randint(1, 4)))],
        "longest_run": lambda r: [_runs(r)],
        "squeeze": lambda r: [_runs(r), r.randint(1, 3)],
        "delta_encode": lambda r: [[r.randint(-5, 20) for _ in range(r.randint(0, 5))]],
        "delta_decode": lambda r: [[r.randint(-5, 9) for _ in range(r.randint(0, 5))]],
        "mask_encode": lambda r: [r.choices((0, 1), k=r.randint(1, 7))],
        "mask_decode": lambda r: [[r.randint(0, 3) for _ in range(r.randint(1, 4))]],
    },
    bugs=r"""
count-up: runs[-1][1] += 1 => runs[-1][1] = 2
    Runs are never longer than two.
    Three equal characters count as two.
single: parts.append(letter if count == 1 else => parts.append(letter if count <= 2 else
    Pairs become a single character.
    Two equal characters are encoded as one.
reset: result += letter * int(number or 1)\n            number = "" => result += letter * int(number or 1)
    A number applies to all that follows.
    Characters without a number are repeated.
no-number: int(number or 1) => int(number or 0)
    Characters without a number are lost.
    Single characters vanish when a text is decoded.
first-best: run[1] > best[1]: => run[1] >= best[1]:
    Of equally long runs the last one is given.
    Ties go to a later run.
delta-first: zip([0] + values, values)] => zip(values[:1] + values, values)]
    The first value is lost among the differences.
    Differences begin with a zero.
running: total += delta => total = delta
    Values are the differences again.
    Undoing differences changes nothing.
last-run: return lengths + [count] => return lengths
    The last run of bits is missing.
    Bits at the end are lost.
parity: bits += [position % 2] * length => bits += [1 - position % 2] * length
    Zeros and ones are exchanged.
    Decoded bits are inverted.
digits: number += letter => number = letter
    Numbers with two digits are read wrong.
    Only the last digit of a number counts.
""",
)


def _words(r: Random) -> list:
    words = ("car", "cart", "care", "cat", "dog", "do", "done", "a", "art", "Cat", "carton")
    return [r.choice(words) for _ in range(r.randint(1, 7))]


TRIE = Library(
    name="trie",
    about="<<A prefix tree of words|Words that are found by how they begin>>",
    names="""
        wordtree: prefixes lexitree; tree_mod: nodes_mod branches_mod; search_mod: queries_mod finding_mod
        build: grow tree_of; contains: has_word is_in; with_prefix: completions words_beginning
        count_prefix: num_with_prefix how_many_begin; longest_prefix: longest_match best_prefix
        unique_prefixes: shortest_unique abbreviations; match_pattern: find_pattern fitting_words
        num_nodes: node_count tree_size; words: vocabulary entries; prefix: beginning stem; node: branch knot
    """,
    files={
        "wordtree/tree_mod.py": '''"""<<Nodes as dicts|The tree>>: children by letter; END counts words."""

END = "$"


def build(words):
    """<<Tree of words, small letters|Build a tree>>; a word may be there several times."""
    root = {}
    for word in words:
        node = root
        for letter in word.lower():
            node = node.setdefault(letter, {})
        node[END] = node.get(END, 0) + 1
    return root


def descend(root, prefix):
    """<<Node of a prefix, in either case; None if there is none|Walk down a tree>>."""
    node = root
    for letter in prefix.lower():
        if letter not in node:
            return None
        node = node[letter]
    return node


def collect(node, prefix):
    """<<Words below a node, in alphabetical order, each once|Read the words of a node>>."""
    found = [prefix] if END in node else []
    for letter in sorted(node):
        if letter != END:
            found.extend(collect(node[letter], prefix + letter))
    return found


def num_nodes(words):
    """<<Number of nodes, the root included|Size of the tree>>."""

    def count(node):
        return 1 + sum(count(child) for letter, child in node.items() if letter != END)

    return count(build(words))
''',
        "wordtree/search_mod.py": '''"""<<Searching|Questions to a tree of words>>."""

from .tree_mod import END, build, collect, descend


def contains(words, word):
    """<<Whether a word is there, in either case, not only as a beginning|Look a word up>>."""
    node = descend(build(words), word)
    return node is not None and END in node


def with_prefix(words, prefix, most=10):
    """<<Words that begin so, in alphabetical order, at most so many|Complete a beginning>>."""
    node = descend(build(words), prefix)
    return [] if node is None else collect(node, prefix.lower())[:most]


def count_prefix(words, prefix):
    """<<How many words begin so; what is there twice counts twice|Count by beginning>>."""
    total = 0
    pending = [descend(build(words), prefix)]
    while pending:
        node = pending.pop() or {}
        total += node.get(END, 0)
        pending.extend(child for letter, child in node.items() if letter != END)
    return total


def longest_prefix(words, text):
    """<<Longest word that the text begins with; an empty text for none|Longest match>>."""
    best = ""
    node = build(words)
    for position, letter in enumerate(text.lower()):
        if letter not in node:
            break
        node = node[letter]
        if END in node:
            best = text.lower()[: position + 1]
    return best


def unique_prefixes(words):
    """<<Shortest beginning of each word that no other word has, else the word|Abbreviations by word>>."""
    result = {}
    known = collect(build(words), "")
    for word in known:
        for length in range(1, len(word) + 1):
            if count_prefix(known, word[:length]) == 1:
                break
        result[word] = word[:length]
    return result


def match_pattern(words, pattern):
    """<<Words of a pattern in which ? is any letter, in order|Find words with unknown letters>>."""
    nodes = [("", build(words))]
    for letter in pattern.lower():
        following = []
        for prefix, node in nodes:
            for name, child in node.items():
                if name != END and letter in ("?", name):
                    following.append((prefix + name, child))
        nodes = following
    return sorted(prefix for prefix, node in nodes if END in node)
''',
    },
    calls={
        "num_nodes": lambda r: [_words(r)],
        "contains": lambda r: [_words(r), r.choice(_words(r) + ["ca", "d", "Car"])],
        "with_prefix": lambda r: [_words(r), r.choice(("c", "ca", "D", "do", "Car", "x", "")), r.randint(1, 5)],
        "count_prefix": lambda r: [_words(r) + _words(r), r.choice(("c", "ca", "D", "do", "x", ""))],
        "longest_prefix": lambda r: [_words(r), r.choice(("cartoon", "Caress", "donkey", "doge", "arts", "xyz"))],
        "unique_prefixes": lambda r: [_words(r)],
        "match_pattern": lambda r: [_words(r), r.choice(("c?t", "ca?", "???", "do", "d?", "C??e", "?", "car?"))],
    },
    bugs=r"""
lower-build: for letter in word.lower(): => for letter in word:
    Words with capitals are not found.
    Capitals are kept in the tree.
lower-find: for letter in prefix.lower():\n        if => for letter in prefix:\n        if
    Searching with a capital finds nothing.
    The case of what is searched for matters.
twice: node[END] = node.get(END, 0) + 1 => node[END] = 1
    Words that are there twice count once.
    Repeated words are not counted.
missing-node: if letter not in node:\n            return None => if letter not in node:\n            return node
    Beginnings that no word has give words nevertheless.
    Unknown endings of a beginning are ignored.
order: for letter in sorted(node):\n        if letter != END: => for letter in node:\n        if letter != END:
    Words come in the order of the input.
    Completions are not in alphabetical order.
whole-word: return node is not None and END in node => return node is not None
    Beginnings of words count as words.
    A word is found although only longer ones are there.
longest: best = text.lower()[: position + 1] => best = best or text.lower()[: position + 1]
    The shortest word is taken and not the longest.
    A longer match is not preferred.
unique: if count_prefix(known, word[:length]) == 1: => if count_prefix(known, word[:length]) <= 2:
    Two words have the same abbreviation.
    Abbreviations are not unique.
any-letter: letter in ("?", name): => letter in ("*", name):
    Question marks stand for nothing.
    Unknown letters are not matched.
pattern-end: sorted(prefix for prefix, node in nodes if END in node) => sorted(prefix for prefix, node in nodes)
    Patterns also find beginnings of words.
    What is found is not always a word.
""",
)

LIBRARIES = [INTERVALS, RUNS, TRIE]
