"""Rows from libraries: a bug is planted, names and wording vary by a seed, calls and tests are drawn.

A library's sources are plain Python under canonical names. ``<<a|b|c>>`` in them, and in a bug's lines, is a choice.
"""

import ast
import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pprint import pformat
from random import Random
from textwrap import dedent
from typing import Any

from running import Outcome, evaluate
from wording import issue, readme

_LONGEST_CALL, _LONGEST_TEST = 500, 88
"""Characters."""
_MOST_TEST_MODULES, _MOST_TEST_LINES = 2, 8
_FEWEST, _MOST = 3, 8
"""Calls of each kind in a row."""
_COMMON_NAMES = """
result: output answer outcome
total: running summed
item: element entry
current: here present
best: top finest
pending: waiting unresolved
"""
"""Variables of all libraries, by what each may be called instead."""
_CODE = re.compile(r'"""[\s\S]*?"""|f?"(?:[^"\\\n]|\\.)*"|(?<![\w\'])[A-Za-z_]\w*')
"""Texts, whole, and names."""


@dataclass(frozen=True)
class Bug:
    """Planted bug: text of a library's sources, what stands there instead, and how users describe it."""

    name: str
    right: str
    wrong: str
    symptoms: Sequence[str]


@dataclass(frozen=True)
class Library:
    """Library under canonical names.

    names   "canonical: synonym synonym; ..."; each of the words may stand for the first, in paths too
    files   modules by path
    calls   arguments by function: of these functions checks are made
    bugs    "name: right => wrong" with indented lines below, each a description; ``\\n`` is a line's end
    """

    name: str
    about: str
    names: str
    files: Mapping[str, str]
    calls: Mapping[str, Callable[[Random], list[Any]]]
    bugs: str

    @cached_property
    def planted(self) -> list[Bug]:
        """Errors: ValueError for a bug whose text is not there exactly once, and for a name given twice."""
        bugs = []
        for block in re.split(r"\n(?=\S)", dedent(self.bugs).strip()):
            head, *symptoms = block.splitlines()
            name, _, change = head.partition(": ")
            right, _, wrong = (part.replace("\\n", "\n") for part in change.partition(" => "))
            count = sum(source.count(right) for source in self.files.values())
            if count != 1 or not symptoms:
                raise ValueError(f"{self.name}, {name}: {count} places, {len(symptoms)} descriptions")
            bugs.append(Bug(name, right, wrong, [symptom.strip() for symptom in symptoms]))
        if len({bug.name for bug in bugs}) < len(bugs):
            raise ValueError(f"{self.name}: two bugs have one name")
        return bugs

    def with_bug(self, bug: Bug) -> dict[str, str]:
        return {path: source.replace(bug.right, bug.wrong) for path, source in self.files.items()}


@dataclass(frozen=True)
class Style:
    """Choices of one row: names, alternatives of wording, which functions there are, and in which order."""

    key: str
    names: Mapping[str, str]
    dropped: frozenset[str]

    def chosen(self, text: str) -> str:
        """Text with an alternative for each choice; equal choices have equal results."""
        return re.sub(r"<<(.*?)>>", lambda match: self._random(match[1]).choice(match[1].split("|")), text)

    def renamed(self, code: str) -> str:
        """Code under the row's names; texts in it stay, but for what f-strings have in braces."""

        def new(match: re.Match[str]) -> str:
            text = match[0]
            if text.startswith('"""'):
                return self.renamed_prose(text)
            if text.startswith('f"'):
                return re.sub(r"\{[^{}]*\}", lambda braces: self.renamed(braces[0]), text)
            return self.names.get(text, text)

        return _CODE.sub(new, code)

    def renamed_prose(self, text: str) -> str:
        """Prose with new names for functions; a single word is rather a word than a name."""
        return re.sub(r"\b\w+_\w+\b", lambda match: self.names.get(match[0], match[0]), text)

    def arranged(self, sources: Mapping[str, str], right: Mapping[str, str]) -> dict[str, str]:
        """Modules without what is dropped, their functions in another order; imports serve the right code as well."""
        kept = {path: _definitions(source, self.dropped) for path, source in sources.items()}
        exist = {name for definitions in kept.values() for name in definitions}
        return {
            path: self._module(source, kept[path], exist, _definitions(right[path], self.dropped))
            for path, source in sources.items()
        }

    def _module(self, source: str, kept: Mapping[str, str], exist: set[str], right: Mapping[str, str]) -> str:
        docstring, *rest = (
            node for node in ast.parse(source).body if not isinstance(node, ast.FunctionDef | ast.ClassDef)
        )
        constants = "\n".join(
            ast.get_source_segment(source, node) or ""
            for node in rest
            if not isinstance(node, ast.Import | ast.ImportFrom)
        )
        used = set(re.findall(r"\w+", "\n".join([*kept.values(), *right.values(), constants])))
        imports = [line for node in rest if (line := _import(node, used, exist))]
        theirs, ours = ("\n".join(x for x in imports if x.startswith("from .") == is_ours) for is_ours in (False, True))
        names = sorted(kept)
        self._random(" ".join(names)).shuffle(names)
        head = [ast.get_source_segment(source, docstring) or "", theirs, ours, constants]
        return "\n\n\n".join(["\n\n".join(filter(None, head)), *(kept[name] for name in names)]) + "\n"

    def _random(self, key: str) -> Random:
        return Random(f"{self.key} {key}")


def _definitions(source: str, dropped: frozenset[str] = frozenset()) -> dict[str, str]:
    """Functions and classes at the top of a module: their text by name."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name: ast.get_source_segment(source, node) or "" for node in nodes if node.name not in dropped}


def _import(node: ast.stmt, used: set[str], exist: set[str]) -> str:
    """Line of an import, with the names that are used and there; empty for none."""
    if isinstance(node, ast.ImportFrom):
        is_ours = node.level > 0
        names = [
            each.name
            for each in node.names
            if each.name in used and (not is_ours or each.name in exist or each.name.isupper())
        ]
        return f"from {'.' * node.level}{node.module} import {', '.join(names)}" if names else ""
    names = [each.name for each in node.names if each.name in used] if isinstance(node, ast.Import) else []
    return f"import {', '.join(names)}" if names else ""


def _names(library: Library, random: Random) -> dict[str, str]:
    """New name of each canonical one, such that no name is used twice."""
    taken = set(re.findall(r"\w+", " ".join([*library.files.values(), *library.files])))
    names = {}
    for line in re.split(r"[\n;]", (library.names + _COMMON_NAMES).strip()):
        canonical, _, synonyms = (part.strip() for part in line.partition(":"))
        free = [canonical, *(word for word in synonyms.split() if word not in taken)]
        names[canonical] = random.choice(free)
        taken.add(names[canonical])
    return names


def _dropped(library: Library, sources: Mapping[str, str], bug: Bug, random: Random) -> frozenset[str]:
    """Up to two functions that nothing calls and that the bug does not touch, and what only they need."""
    texts = {name: text for source in sources.values() for name, text in _definitions(source).items()}
    uses = {name: {word for word in re.findall(r"\w+", text) if word in texts} - {name} for name, text in texts.items()}
    touched = {name for name, text in texts.items() if bug.right in text} or set(texts)
    while more := {name for name, used in uses.items() if used & touched} - touched:
        touched |= more
    dropped: set[str] = set()
    free = sorted(set(library.calls) - touched)
    for name in random.sample(free, min(len(free), random.randint(0, 2))):
        others = {word for other, used in uses.items() if other not in dropped for word in used}
        if name not in others and len(set(library.calls) - dropped) > 4:
            dropped.add(name)
    while True:
        needed = {word for name in set(texts) - dropped for word in uses[name]} | set(library.calls)
        unused = {name for name in set(texts) - dropped - needed if bug.right not in texts[name]}
        if not unused:
            return frozenset(dropped)
        dropped |= unused


def _renamed_path(path: str, style: Style) -> str:
    return "/".join(style.names.get(part, part) for part in path.removesuffix(".py").split("/")) + ".py"


@dataclass(frozen=True)
class _Call:
    """Call with what it gives in the right code and in the wrong one; ``function``: canonical."""

    function: str
    arguments: list[Any]
    right: Outcome
    wrong: Outcome

    @property
    def size(self) -> int:
        return len(json.dumps(self.arguments)) + len(self.right.text) + len(self.wrong.text)


def _draw(library: Library, style: Style, random: Random, draws: int) -> list[tuple[str, list[Any]]]:
    """Calls without repetitions."""
    drawn = {}
    for function, arguments in library.calls.items():
        for _ in range(draws if function not in style.dropped else 0):
            values = json.loads(json.dumps(arguments(random)))
            drawn[json.dumps([function, values])] = (function, values)
    return list(drawn.values())


def make_row(library: Library, bug: Bug, seed: int, number: int, draws: int) -> dict[str, Any]:
    """Row of the data set. ``draws``: arguments for each function.

    Errors: ValueError where too few calls show the bug, or too few do not."""
    key = f"{seed} {library.name} {bug.name} {number}"
    random = Random(key)
    style = Style(key, _names(library, random), frozenset())
    worded = {path: style.chosen(source) for path, source in library.files.items()}
    style = replace(style, dropped=_dropped(library, worded, bug, random))

    def written(sources: Mapping[str, str]) -> dict[str, str]:
        arranged = style.arranged({path: style.chosen(source) for path, source in sources.items()}, worded)
        return {_renamed_path(path, style): style.renamed(source) for path, source in arranged.items()}

    right, wrong = written(library.files), written(library.with_bug(bug))
    package = next(iter(right)).partition("/")[0]
    places = {
        name: f"{path.removesuffix('.py').replace('/', '.')}:{name}"
        for path, source in right.items()
        for name in _definitions(source)
    }
    about, exported = (
        style.chosen(library.about),
        [style.names.get(name, name) for name in library.calls],
    )
    exported = [name for name in exported if name in places]
    init = f'"""{about}."""\n\n' + "".join(
        f"from .{path.partition('/')[2].removesuffix('.py')} import {', '.join(names)}\n"
        for path, source in right.items()
        if (names := [name for name in sorted(_definitions(source)) if name in exported])
    )
    calls = _outcomes(
        _draw(library, style, random, draws), (right, wrong), f"{package}/__init__.py", init, places, style
    )
    fails = [call for call in calls if call.right.is_value and call.right != call.wrong]
    holds = [call for call in calls if call.right == call.wrong]
    shown = _pick(fails, random)
    kept = _pick([call for call in holds if call.right.is_value], random, {call.function for call in shown})
    if len(shown) < _FEWEST or len(kept) < _FEWEST:
        raise ValueError(f"{library.name}, {bug.name}: {len(fails)} calls fail, {len(kept)} of {len(holds)} hold")
    around = {f"{package}/__init__.py": init}
    around |= _tests([call for call in holds if call not in kept], style, places, package, random)
    around["README.md"] = readme(package, about, right, exported, random)
    files = around | wrong
    return {
        "instance_id": f"made/{library.name}-{bug.name}-{number:03d}",
        "problem_statement": issue(
            style.renamed_prose(style.chosen(random.choice(bug.symptoms))),
            [(_written(call, style), call.wrong, call.right) for call in sorted(shown, key=lambda call: call.size)],
            package,
            random,
        ),
        "files": dict(sorted(files.items())),
        "PASS_TO_PASS": sorted(path.removesuffix(".py").replace("/", ".") for path in files if "/test_" in path),
        "calls": [
            {
                "function": places[style.names.get(call.function, call.function)],
                "arguments": call.arguments,
                "expected": json.loads(call.right.text),
                "when": when,
            }
            for when, chosen in (("FAIL_TO_PASS", shown), ("PASS_TO_PASS", kept))
            for call in chosen
        ],
        "patch": "".join(patch(path, wrong[path], right[path]) for path in right),
        "solution": [sed(path, wrong[path], right[path]) for path in right if wrong[path] != right[path]],
    }


def _outcomes(
    drawn: list, versions: Sequence[dict[str, str]], path: str, init: str, places: dict, style: Style
) -> list:
    """Calls with both outcomes, where these depend on nothing but the arguments."""
    asked = [(places[style.names.get(function, function)], arguments) for function, arguments in drawn]
    both = [evaluate(files | {path: init}, asked, passes=2)[0] for files in versions]
    calls = [
        _Call(function, arguments, right, wrong)
        for (function, arguments), right, wrong in zip(drawn, *both, strict=True)
        if right is not None and wrong is not None
    ]
    return [call for call in calls if call.size <= _LONGEST_CALL]


def _pick(calls: Sequence[_Call], random: Random, first: Set[str] = frozenset()) -> list[_Call]:
    """Some calls, no more than needed with one value; those of the functions ``first`` make half of them, if any."""
    most = random.randint(5, _MOST)
    mixed = random.sample(calls, len(calls))
    seen: dict[tuple[str, str], int] = {}
    ranks = {}
    for call in mixed:
        rank = seen[call.function, call.right.text] = seen.get((call.function, call.right.text), 0) + 1
        ranks[id(call)] = rank
    mixed.sort(key=lambda call: ranks[id(call)])
    near = [call for call in mixed if call.function in first][: most // 2]
    return (near + [call for call in mixed if call not in near])[:most]


def _written(call: _Call, style: Style) -> str:
    """Call as Python."""
    return f"{style.names.get(call.function, call.function)}({', '.join(map(repr, call.arguments))})"


def _tests(calls: Sequence[_Call], style: Style, places: Mapping[str, str], package: str, random: Random) -> dict:
    """Visible test modules by path: a class for each module, a method for each function."""
    methods: dict[str, dict[str, list[str]]] = {}
    for call in sorted(random.sample(calls, len(calls)), key=lambda call: call.size > _LONGEST_TEST):
        name = style.names.get(call.function, call.function)
        module = places[name].partition(":")[0].rpartition(".")[2]
        lines = methods.setdefault(module, {}).setdefault(name, [])
        new = _assertion(call, name)
        if (new and not lines) or len(lines) + len(new) <= 3:
            lines += new
    files = {"tests/__init__.py": '"""Tests."""\n'}
    for module, functions in sorted(methods.items())[:_MOST_TEST_MODULES]:
        functions = {name: lines for name, lines in functions.items() if lines}
        if not functions:
            continue
        head = f"import unittest\n\nfrom {package}.{module} import {', '.join(sorted(functions))}\n"
        bodies = [
            f"    def test_{name}(self):\n" + "".join(f"        {line}\n" for line in lines)
            for name, lines in sorted(functions.items())
        ]
        label = "".join(part.title() for part in module.split("_"))
        files[f"tests/test_{module}.py"] = f"{head}\n\nclass {label}Test(unittest.TestCase):\n" + "\n".join(bodies)
    return files


def _assertion(call: _Call, name: str) -> list[str]:
    """Lines of an assertion; none for an error that is no ValueError, and for what takes too many lines."""
    values = ", ".join(map(repr, call.arguments))
    if not call.right.is_value:
        is_shown = call.right.text.startswith("ValueError") and len(values) < _LONGEST_TEST
        return ["with self.assertRaises(ValueError):", f"    {name}({values})"] if is_shown else []
    expected = repr(json.loads(call.right.text))
    line = f"self.assertEqual({name}({values}), {expected})"
    if len(line) <= _LONGEST_TEST:
        return [line]
    head = "arguments = "
    first, *rest = pformat(call.arguments, width=_LONGEST_TEST, compact=True).splitlines()
    lines = [head + first, *(" " * len(head) + each for each in rest)]
    lines.append(f"self.assertEqual({name}(*arguments), {expected})")
    return lines if len(lines) <= _MOST_TEST_LINES and len(lines[-1]) <= _LONGEST_TEST + 20 else []


def patch(path: str, wrong: str, right: str) -> str:
    """Unified diff of a file; empty where nothing differs."""
    lines = difflib.unified_diff(
        wrong.splitlines(keepends=True), right.splitlines(keepends=True), f"a/{path}", f"b/{path}"
    )
    return "".join(lines)


def sed(path: str, wrong: str, right: str) -> str:
    """Command that changes one file into the other. Errors: ValueError for text with an apostrophe."""
    before, after = wrong.splitlines(), right.splitlines()
    expressions = []
    for kind, low, high, start, end in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        lines = after[start:end]
        paired = min(high - low, len(lines))
        expressions += [_substitute(low + at, before, lines[at]) for at in range(paired)]
        if high - low > paired:
            first, last = low + paired + 1, high
            expressions.append(f"{first}d" if first == last else f"{first},{last}d")
        if len(lines) > paired:
            # one-line form of GNU sed; a backslash keeps the indentation
            expressions += [f"{low + paired}a\\{line}" for line in lines[paired:]]
    if any("'" in expression for expression in expressions):
        raise ValueError(f"{path}: an apostrophe in {expressions}")
    flag = "-e " if len(expressions) > 1 else ""
    return " ".join(["sed -i", *(f"{flag}'{each}'" for each in expressions), path])


def _substitute(at: int, lines: Sequence[str], new: str) -> str:
    """Expression that changes one line by its smallest distinct part, in whole words."""
    old_words, new_words = (re.findall(r"\w+|\s+|[^\w\s]", line) for line in (lines[at], new))
    head = 0
    while head < min(len(old_words), len(new_words)) and old_words[head] == new_words[head]:
        head += 1
    tail = 0
    while tail < min(len(old_words), len(new_words)) - head and old_words[-1 - tail] == new_words[-1 - tail]:
        tail += 1
    text, address = "\n".join(lines), f"{at + 1}"
    while head or tail:
        part = "".join(old_words[head : len(old_words) - tail])
        if part.strip() and text.count(part) == 1:
            address = ""
            break
        if part.strip() and len(part) > 40 and lines[at].count(part) == 1:
            break
        head, tail = max(0, head - 1), max(0, tail - 1)
    old, new = ("".join(words[head : len(words) - tail]) for words in (old_words, new_words))
    mark = next(mark for mark in "/|#@" if mark not in old + new)
    pattern, replacement = re.sub(r"([\\.*\[\]^$])", r"\\\1", old), re.sub(r"([\\&])", r"\\\1", new)
    return f"{address}s{mark}{pattern}{mark}{replacement}{mark}"
