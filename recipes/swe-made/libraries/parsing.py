"""Libraries that read text: a calculator, comma-separated values."""

from random import Random

from repository import Library


def _expression(r: Random, depth: int = 2) -> str:
    if depth == 0 or r.random() < 0.2:
        return str(r.randint(0, 9)) if r.random() < 0.9 else f"-{r.randint(1, 9)}"
    left, right = _expression(r, depth - 1), _expression(r, depth - 1)
    text = f"{left}{r.choice((' ', ''))}{r.choice('++--**/^%')} {right}"
    return f"({text})" if r.random() < 0.35 else text


CALCULATOR = Library(
    name="calculator",
    about="<<A tokenizer and a calculator for whole-number expressions|Evaluation of arithmetic in texts>>",
    names="""
        calculate: calctext sums_in_text; tokens_mod: scanner lexer; parser_mod: grammar reckoner
        tokenize: scan split_tokens; evaluate_text: compute value_of_text; to_postfix: reverse_polish postfix_of
        run_postfix: postfix_value evaluate_postfix; balanced: parentheses_match well_nested
        names_used: variables identifiers; expression: formula source_text; token: lexeme symbol; stack: pile operands
        waiting: operators held
    """,
    files={
        "calculate/tokens_mod.py": r'''"""<<Tokens of an expression|Splitting a text into tokens>>."""

import re

TOKEN = re.compile(r"\s*(\d+|[A-Za-z_]\w*|[-+*/%^()])")
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "%": 2, "^": 3, "neg": 4}
FROM_RIGHT = ("^", "neg")


def tokenize(expression):
    """<<Numbers, names and signs of a text; a minus sign before a value is called neg|List of tokens>>."""
    tokens = []
    position = 0
    text = expression.rstrip()
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None:
            raise ValueError("unexpected character")
        token = match[1]
        if token == "-" and (not tokens or tokens[-1] in PRECEDENCE or tokens[-1] == "("):
            token = "neg"
        tokens.append(token)
        position = match.end()
    return tokens


def balanced(expression):
    """<<Whether each parenthesis has its partner|Check the parentheses of a text>>."""
    depth = 0
    for letter in expression:
        if letter == "(":
            depth += 1
        elif letter == ")":
            depth -= 1
            if depth < 0:
                return False
    return depth == 0


def names_used(expression):
    """<<Names in an expression, sorted, each once|Which variables a text has>>."""
    return sorted({token for token in tokenize(expression) if token[0].isalpha() and token != "neg"})
''',
        "calculate/parser_mod.py": r'''"""<<Order of operations and values|Evaluation>>."""

from .tokens_mod import FROM_RIGHT, PRECEDENCE, balanced, tokenize


def to_postfix(expression):
    """<<Tokens with each operator after its operands|Reverse Polish notation>>; powers group from the right."""
    if not balanced(expression):
        raise ValueError("parentheses do not match")
    result = []
    waiting = []
    for token in tokenize(expression):
        if token == "(":
            waiting.append(token)
        elif token == ")":
            while waiting[-1] != "(":
                result.append(waiting.pop())
            waiting.pop()
        elif token in PRECEDENCE:
            while token != "neg" and waiting and waiting[-1] != "(":
                above, own = PRECEDENCE[waiting[-1]], PRECEDENCE[token]
                if above < own or (above == own and token in FROM_RIGHT):
                    break
                result.append(waiting.pop())
            waiting.append(token)
        else:
            result.append(token)
    return result + waiting[::-1]


def run_postfix(tokens, values):
    """<<Value of tokens in postfix order; division rounds down|Evaluate tokens, with values for names>>."""
    stack = []
    for token in tokens:
        if token == "neg":
            stack.append(-stack.pop())
        elif token in PRECEDENCE:
            right = stack.pop()
            left = stack.pop()
            stack.append(apply_sign(token, left, right))
        elif token.isdigit():
            stack.append(int(token))
        else:
            stack.append(values[token])
    return stack[-1]


def apply_sign(sign, left, right):
    """<<Value of one operation|Apply an operator to two numbers>>; ValueError for a division by zero."""
    if sign in "/%" and right == 0:
        raise ValueError("division by zero")
    if sign == "+":
        return left + right
    if sign == "-":
        return left - right
    if sign == "*":
        return left * right
    if sign == "/":
        return left // right
    if sign == "%":
        return left % right
    return left ** max(0, right)


def evaluate_text(expression, values=None):
    """<<Value of an expression|Compute what a text says>>, with values for its names."""
    return run_postfix(to_postfix(expression), values or {})
''',
    },
    calls={
        "tokenize": lambda r: [_expression(r) + r.choice(("", "", " + x_1", "*abc", " $"))],
        "balanced": lambda r: ["".join(r.choices("()1", k=r.randint(1, 5)))],
        "names_used": lambda r: [f"{r.choice('xyab')}1 + {r.choice('xyab')} * {r.choice(('-x', '3', 'Rate'))}"],
        "to_postfix": lambda r: [r.choice((_expression(r), f"2 ^ {r.randint(0, 3)} ^ {r.randint(0, 2)}", "(1 + 2"))],
        "evaluate_text": lambda r: r.choice(
            (
                [_expression(r)],
                [f"-{r.randint(1, 9)} / {r.randint(2, 5)}"],
                [f"x {r.choice('+-*/')} {_expression(r)}", {"x": r.randint(1, 9)}],
            )
        ),
        "apply_sign": lambda r: [r.choice("+-*/%^^^"), r.randint(-9, 9), r.randint(-3, 5)],
    },
    bugs=r"""
precedence: "*": 2, "/": 2, => "*": 1, "/": 1,
    Products are not computed before sums.
    Multiplication has no precedence over addition.
right-group: FROM_RIGHT = ("^", "neg") => FROM_RIGHT = ("neg",)
    Chains of powers are grouped from the left.
    A power of a power is computed in the wrong order.
left-group: (above == own and token in FROM_RIGHT) => above == own
    Several subtractions in a row are grouped from the right.
    Chains of equal operators are computed from the wrong end.
negative-after: not tokens or tokens[-1] in PRECEDENCE or => not tokens or
    A minus sign after an operator is not understood.
    Negative numbers on the right side of an operator raise an error.
negative-open: or tokens[-1] == "("): => or tokens[-1] == ")"):
    A minus sign after a parenthesis is treated wrongly.
    Subtracting from a parenthesis does not work.
open-end: return depth == 0 => return depth >= 0
    Parentheses that are never closed pass.
    An open parenthesis at the end is not reported.
operands: right = stack.pop()\n            left = stack.pop() => left = stack.pop()\n            right = stack.pop()
    Differences have the wrong sign.
    The two sides of an operation are exchanged.
division: return left // right => return int(left / right)
    Division of negative numbers rounds towards zero.
    Quotients below zero are not rounded down.
leftover: return result + waiting[::-1] => return result + waiting
    Operators that are left at the end come in the wrong order.
    Expressions with operators of rising precedence fail.
power-negative: return left ** max(0, right) => return left ** abs(right)
    Negative exponents are taken as positive ones.
    A power with a negative exponent is not one.
""",
)

_CELLS = ("a", "b c", "12", "", "x,y", 'say "hi"', " pad ", "3.5", "Zed", "-7")


def _quoted(cell: str, r: Random) -> str:
    return '"' + cell.replace('"', '""') + '"' if "," in cell or '"' in cell or r.random() < 0.2 else cell


def _csv(r: Random, rows: int = 3) -> str:
    head = "name,size,note"
    lines = [",".join(_quoted(r.choice(_CELLS), r) for _ in range(3)) for _ in range(r.randint(1, rows))]
    return r.choice(("\n", "\n", "\n\n")).join([head, *lines]) + r.choice(("", "\n"))


TABLE = Library(
    name="csv",
    about="<<Tables of comma-separated values|Reading, writing and querying of separated values>>",
    names="""
        commatable: sheetlets plaintables; cells_mod: fields records; query_mod: selection columns_mod
        split_line: cells_of parse_line; join_line: line_of write_line; parse_table: read_table rows_from
        guess_value: typed infer; column: column_values pick_column; sort_rows: ordered_rows sorted_by
        group_count: counts_by tally; filter_rows: where select_rows; to_text: dump write_table
        separator: delimiter divider; quoted: inside in_quotes
    """,
    files={
        "commatable/cells_mod.py": r'''"""<<Lines and cells|Reading and writing lines>>."""

QUOTE = chr(34)


def split_line(line, separator=","):
    """<<Cells of a line; a quoted cell may hold separators, and doubled quotes|Split a line>>."""
    cells = []
    cell = ""
    quoted = False
    position = 0
    while position < len(line):
        letter = line[position]
        if quoted and letter == QUOTE and line[position + 1 : position + 2] == QUOTE:
            cell += QUOTE
            position += 1
        elif letter == QUOTE:
            quoted = not quoted
        elif letter == separator and not quoted:
            cells.append(cell)
            cell = ""
        else:
            cell += letter
        position += 1
    return cells + [cell]


def join_line(cells, separator=","):
    """<<Line of cells, quoted where they hold a separator or a quote|Write a line>>."""
    parts = []
    for cell in cells:
        text = "" if cell is None else str(cell)
        if separator in text or QUOTE in text:
            text = QUOTE + text.replace(QUOTE, QUOTE * 2) + QUOTE
        parts.append(text)
    return separator.join(parts)


def guess_value(text):
    """<<Whole number, number, None for nothing, or the text as it is|Value of a cell by its look>>."""
    clean = text.strip()
    if clean == "":
        return None
    if clean.lstrip("-").isdigit():
        return int(clean)
    try:
        return float(clean)
    except ValueError:
        return text
''',
        "commatable/query_mod.py": r'''"""<<Tables and what is asked of them|Queries on rows>>."""

from .cells_mod import guess_value, join_line, split_line


def parse_table(text):
    """<<Row for each line after the first, as a dict with the names of the first|Read a table>>; no empty lines."""
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        return []
    names = split_line(lines[0])
    return [dict(zip(names, map(guess_value, split_line(line)))) for line in lines[1:]]


def column(text, name):
    """<<Values of one column|All values under a name>>; None where a row lacks it."""
    return [row.get(name) for row in parse_table(text)]


def filter_rows(text, name, least):
    """<<Rows whose number in a column is at least so large|Select rows by a number>>; others are left out."""
    rows = parse_table(text)
    return [row for row in rows if isinstance(row.get(name), (int, float)) and row[name] >= least]


def sort_rows(text, name, descending=False):
    """<<Rows by a column: numbers, then texts, and rows with nothing at the end|Rows in the order of a column>>."""
    rows = parse_table(text)
    empty = [row for row in rows if row.get(name) is None]
    numbers = [row for row in rows if isinstance(row.get(name), (int, float))]
    texts = [row for row in rows if isinstance(row.get(name), str)]
    numbers.sort(key=lambda row: row[name], reverse=descending)
    texts.sort(key=lambda row: row[name].lower(), reverse=descending)
    return numbers + texts + empty


def group_count(text, name):
    """<<Number of rows for each value of a column, by the value as text|Count rows by a column>>."""
    result = {}
    for value in column(text, name):
        key = "" if value is None else str(value)
        result[key] = result.get(key, 0) + 1
    return result


def to_text(text, names):
    """<<Table with some columns alone, in the order of the names|Choose columns, and write a table>>."""
    lines = [join_line(names)]
    for row in parse_table(text):
        lines.append(join_line([row.get(name) for name in names]))
    return "\n".join(lines)
''',
    },
    calls={
        "split_line": lambda r: [",".join(_quoted(r.choice(_CELLS), r) for _ in range(r.randint(1, 4)))],
        "join_line": lambda r: [
            [r.choice((*_CELLS, 5, None)) for _ in range(r.randint(1, 4))],
            r.choice((",", ",", ";")),
        ],
        "guess_value": lambda r: [r.choice(("", "-", "x1", f"{r.randint(-9, 9)}.5", f" {r.randint(-40, 40)}"))],
        "column": lambda r: [_csv(r), r.choice(("name", "size", "note", "none"))],
        "filter_rows": lambda r: [_csv(r, 6), r.choice(("name", "size")), r.choice((-7, 3.5, 12, 0))],
        "sort_rows": lambda r: [_csv(r, 6), r.choice(("name", "size", "note")), r.choice((True, False))],
        "group_count": lambda r: [_csv(r, 6), r.choice(("name", "size", "note"))],
        "to_text": lambda r: [_csv(r), r.sample(("name", "size", "note", "more"), r.randint(1, 3))],
    },
    bugs=r"""
last-cell: return cells + [cell] => return cells + ([cell] if cell else [])
    An empty cell at the end of a line is lost.
    Lines that end with a separator have a cell too few.
quoted-comma: elif letter == separator and not quoted: => elif letter == separator:
    Commas inside quotes split the cell.
    Quoted cells with a comma come apart.
reset: cells.append(cell)\n            cell = "" => cells.append(cell)
    Each cell begins with all the cells before it.
    Cells after the first are too long.
write-quotes: text.replace(QUOTE, QUOTE * 2) + QUOTE => text + QUOTE
    Quotes inside a cell are not doubled when it is written.
    What is written cannot be read again if a cell has a quote.
write-comma: if separator in text or QUOTE in text: => if QUOTE in text:
    Cells with a separator are written without quotes.
    A comma in a cell makes two cells of it once it is written.
nothing: text = "" if cell is None else str(cell) => text = str(cell)
    Missing values are written as the word None.
    Empty cells do not stay empty when a table is written.
sign: if clean.lstrip("-").isdigit(): => if clean.isdigit():
    Negative whole numbers become fractional ones.
    Numbers below zero are not read as whole numbers.
blank-cell: if clean == "":\n        return None => if text == "x":\n        return None
    Empty cells are empty texts and not None.
    A cell without anything in it is not seen as missing.
at-least: and row[name] >= least] => and row[name] > least]
    Rows that just reach the bound are left out.
    The lower bound itself is not included.
letters: key=lambda row: row[name].lower(), => key=lambda row: row[name],
    Capital letters come before all small ones.
    The order of texts depends on their case.
empty-first: return numbers + texts + empty => return empty + numbers + texts
    Rows with nothing in the column come first.
    Sorting puts missing values at the top.
first-row: for line in lines[1:]] => for line in lines[2:]]
    The first row of the table is missing.
    One row is lost, the one below the names.
""",
)

LIBRARIES = [CALCULATOR, TABLE]
