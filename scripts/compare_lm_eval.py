r"""Comparison of how answers of public sets are scored here and by lm-eval 0.4.13, on random answers.

From a checkout with its .venv, whose packages stay as they are:

    .venv/bin/uv run --no-project --with "lm-eval[ifeval,math]==0.4.13" scripts/compare_lm_eval.py

titan_rl scores by a suite's task, as ``titan-rl eval`` does; lm-eval by the filters, metrics and functions of its own
tasks. Scores may differ in the kinds that are named here, and in no others. Answers of mathematics are made of the
expected one, so that their score is known, and titan_rl must give that. Programs are not compared. Nothing is
downloaded: two kinds of IFEval are compared where ``python -m nltk.downloader punkt_tab`` has been run. On two cores it
takes 2 minutes.
Exit code: 0; 1 if a score differs that should not; 2 for bad input.
"""

import argparse
import json
import logging
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from random import Random
from string import ascii_uppercase
from typing import Any, NamedTuple

from titan_rl.config.load import load_config
from titan_rl.environments.rollout.suites import Suite, make_suites
from titan_rl.records.evaluations.estimators import estimate, pass_at

LM_EVAL, NUM_ROWS, DIGITS = "0.4.13", 200, "0123456789"
Cases = dict[str, list["Case"]]
"""By the rule's name."""


class Case(NamedTuple):
    """Answer with its two scores."""

    answer: str
    ours: float
    theirs: float
    kind: str = ""
    """Kind of difference; empty: they may not differ."""
    known: float | None = None
    """Score by the making of the answer."""

    @property
    def is_different(self) -> bool:
        return abs(self.ours - self.theirs) > 1e-12

    @property
    def is_failure(self) -> bool:
        return (self.is_different and not self.kind) or self.known not in (None, self.ours)


class LMEvalTask:
    """Task of lm-eval by its YAML, on given rows instead of the Hub's."""

    def __init__(self, path: str, rows: Sequence[Mapping[str, Any]]):
        folder = Path(import_module("lm_eval").__file__ or "").parent / "tasks"
        config = import_module("lm_eval.tasks._yaml_loader").load_yaml(folder / path)
        config.pop("tag", None)
        splits = dict.fromkeys(("train", "validation", "test"), import_module("datasets").Dataset.from_list(list(rows)))
        config["custom_dataset"] = lambda **_: splits
        self.task = import_module("lm_eval.api.task").ConfigurableTask(config=config)
        self.documents = list(self.task.test_docs())

    def read(self, row: int, answer: str) -> dict[str, str]:
        """What each filter reads."""
        instance = import_module("lm_eval.api.instance").Instance
        asked = instance("generate_until", self.documents[row], ("", {}), 0, resps=[answer])
        for filters in vars(self.task)["_filters"]:
            filters.apply([asked])
        return asked.filtered_resps

    def scores(self, row: int, answer: str) -> dict[str, float]:
        """Scores by filter and metric."""
        return {
            f"{name} {metric}": float(score)
            for name, reply in self.read(row, answer).items()
            for metric, score in self.task.process_results(self.documents[row], [reply]).items()
        }


def suite_of(name: str, rows: Sequence[Mapping[str, Any]]) -> Suite:
    """Suite of titan_rl on given rows."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        [suite] = make_suites(load_config(None, {"eval": {"suites": [{"name": name, "file": str(file)}]}}))
        return suite.with_prompts(len(rows))


def score(suite: Suite, row: int, answer: str) -> float:
    right = suite.task.score(suite.prompts[row], [answer])["right"]
    assert isinstance(right, float), "one answer has one score"
    return right


def split(texts: str) -> list[str]:
    return texts.split("|")


def filled(frame: str, texts: Iterable[str]) -> str:
    """Frame with a text in the place of each @."""
    iterator = iter(texts)
    return re.sub("@", lambda _: next(iterator), frame)


# GSM8K

SPELLINGS = split(
    "@|@|@|@|@|$@|@.|@..|@,|@ apples|**@**|@%|\\$@|-@|- @|@.0|(@)|@e3|\\boxed{@}|0@|@/2|@-7|@½|€@|@:30| @|@\u00a0km|"
    "1 @|−@|+@|@\n"
)
GSM8K = split(
    "#### @|#### @|#### @|So:\n#### @|#### @ #### @|#### @\n#### @|####@|####  @|### @|##### @|It is @.|@ + @ = @||"
    "It is @. #### @|#### @\nso @|####\n@|#### **@**|#### x@|@|<<@*2=@>>@\n#### @| \n|#### |#### .|#### ,|#### $|"
    "seven|$ . ,"
)


def number(random: Random) -> str:
    value = random.choice((random.randint(0, 20), random.randint(0, 10**7), random.randint(-999, 9)))
    return random.choice((f"{value}", f"{value}", f"{value:,}", f"{value}.5", f"{value}.0", f".{abs(value)}"))


def gsm8k_answer(random: Random, expected: str) -> str:
    """Answer with numbers as models write them, or nearly so."""

    def spelled() -> Iterable[str]:
        while True:
            text = expected if random.random() < 0.7 else number(random)
            text = text.replace(",", "") if random.random() < 0.3 else text
            digits = random.choice((*[DIGITS] * 19, "０１２３４５６７８９", "٠١٢٣٤٥٦٧٨٩"))
            yield random.choice(SPELLINGS).replace("@", text.translate(str.maketrans(DIGITS, digits)))

    filler = random.choice(split("Step 3: 4. |#|9|1,|word ")) * 3000 if random.random() < 0.01 else ""
    return filler + filled(random.choice(GSM8K), spelled())


def gsm8k(random: Random, num_answers: int) -> Cases:
    rows = [{"question": "?", "answer": f"So.\n#### {number(random)}"} for _ in range(NUM_ROWS)]
    suite, task = suite_of("gsm8k", rows), LMEvalTask("gsm8k/gsm8k.yaml", rows)
    cases: Cases = {"gsm8k strict": [], "gsm8k flexible": []}
    for row in (index % NUM_ROWS for index in range(num_answers)):
        prompt = suite.prompts[row]
        answer = gsm8k_answer(random, prompt.answer)
        theirs, flexible = task.scores(row, answer), suite.readings(prompt, answer)["flexible"]
        cases["gsm8k strict"].append(Case(answer, score(suite, row, answer), theirs["strict-match exact_match"]))
        cases["gsm8k flexible"].append(Case(answer, float(flexible), theirs["flexible-extract exact_match"]))
    return cases


# multiple choice

CHOICES = split(
    "The answer is (@).|So the answer is @.|Think.\nTherefore, the answer is (@)|the answer is @|Answer: @|@|@.|(@)||"
    "**Answer: @**|The answer is (@).\n\nAnswer: @|The answer is (@) or (@).|The answer is not (@).|Answer: @, @|No.|"
    "It is: the answer is (@). No: (@).|The answer is (@).\nI hope this helps.|I like @|The answer is @. option @|"
    "The answer is @mazing|\\boxed{@}|The answer is \\boxed{@}.|The answer is **@**.|the answer is [@]|It is option @|"
    "THE ANSWER IS @|The answer is (@).\nThe answer is (@).|The answer is\n(@)|The answer is: @"
)
SAID_ONCE = re.compile(r"(?:So |Therefore, )?[Tt]he answer is \(?[A-J]\)?\.?")


def multiple_choice(random: Random, num_answers: int) -> Cases:
    letters = [ascii_uppercase[: random.randint(4, 10)] for _ in range(NUM_ROWS)]
    common = {"question": "?", "category": "biology", "cot_content": ""}
    rows = [common | {"options": [f"option {x}" for x in some], "answer": random.choice(some)} for some in letters]
    suite, task = suite_of("mmlu_pro", rows), LMEvalTask("mmlu_pro/mmlu_pro_biology.yaml", rows)
    cases: Cases = {"mmlu_pro, ends with 'the answer is (X)'": [], "mmlu_pro, other answers": []}
    for row in (index % NUM_ROWS for index in range(num_answers)):
        named = (random.choice((*rows[row]["answer"] * 8, *"ABCDJKbА")) for _ in range(2))
        filler = "Not A. " * 2000 if random.random() < 0.01 else ""
        answer = filler + filled(random.choice(CHOICES), named)
        kind = "the last line counts; lm-eval takes the first 'answer is X'"
        if task.read(row, answer)["custom-extract"] == "[invalid]":
            kind = "a last line 'Answer: X' counts, and its like; lm-eval reads 'answer is X' alone"
        elif suite.final(suite.prompts[row], answer) is None:
            kind = "a last line that names two, denies one or goes on names none; lm-eval takes the first 'answer is X'"
        is_once = answer.count("answer is") == 1 and SAID_ONCE.fullmatch(answer.splitlines()[-1]) is not None
        theirs = task.scores(row, answer)["custom-extract exact_match"]
        case = Case(answer, score(suite, row, answer), theirs, "" if is_once else kind)
        cases[list(cases)[not is_once]].append(case)
    return cases


# mathematics

FRAMES = split(
    r"So the answer is $\boxed{@}$.|\[ \boxed{@} \]|First $\boxed{%}$, but then $\boxed{@}$.|The answer is $@$.|$@$|@|"
    r"It is $\boxed{@}$. Final Answer: The final answer is $@$. I hope it is correct.|**$\boxed{@}$**|\boxed{ @ }|"
    r"Not $%$, so $1 < \boxed{@}$"
)
NO_ANSWER = "", "I do not know.", r"\boxed{}", r"\boxed{?}", "$$", "so " * 4000
MATH500 = {
    "{n}": (
        r"{n}|{n:,}|{n}.0|\frac{{{n}0}}{{10}}|x = {n}|{n}.|{n}\text{{ cm}}|\${n}|+{n}|\text{{{n}}}|{n}\cdot 1",
        r"{n}1|-{n}|{n}0|{n}.5|\frac{{1}}{{{n}}}|{n} \text{{ or }} {n}1|\pm {n}|2x={n}|{n} > 1",
    ),
    r"\frac{{{p}}}{{8}}": (
        r"\frac{{{p}}}{{8}}|\dfrac{{{p}}}8|\tfrac{{-{p}}}{{-8}}|{p}/8|{q}|\frac{{{p}0}}{{80}}|{q}0",
        r"\frac{{8}}{{{p}}}|-\frac{{{p}}}{{8}}|{q}1|{p}|\frac{{{p}}}{{9}}|{p}\frac{{1}}{{8}}|{q}\%",
    ),
    r"{a}\sqrt{{5}}": (
        r"{a}\sqrt{{5}}|{a}\sqrt5|\sqrt{{5}} \cdot {a}|\frac{{{a}0}}{{\sqrt{{20}}}}|\sqrt{{5\cdot {a}^2}}",
        r"\sqrt{{{a}5}}|{a}+\sqrt{{5}}|{a}\sqrt{{6}}|{a}\pi|{a}\cdot 2.24",
    ),
    "({a},-{b})": (r"({a}, -{b})|\left({a},-{b}\right)|({a}.0,-{b})", "(-{b},{a})|({a},{b})|{a}|[{a},-{b}]"),
    "[-{b},{a})": (r"[-{b}, {a})|\left[-{b},{a}\right)", "(-{b},{a})|[-{b},{a}]|(-{b},{a}]|-{b}"),
    "x^2+{a}x+{b}": ("x^{{2}} + {a}x + {b}|{b}+{a}x+x^2|x(x+{a})+{b}", "x^2-{a}x+{b}|x^2+{a}x|{a}x+{b}|x^2+{a}x+1{b}"),
}
"""Ways to write an expected answer, and others that are unequal."""
AIME = {"{n}": ("{n}|{n:03}|{n}.|n = {n}|{n}.0", "{n}1|-{n}|{n}0|{n}.5|{n}, {n}1")}


def value(random: Random, templates: Mapping[str, tuple[str, str]]) -> list[list[str]]:
    """Expected answer, equal ones and unequal ones."""
    p, most = random.choice((1, 3, 5, 7, 9)), 999 if templates is AIME else 99_999
    numbers = {"n": random.randint(2, most), "p": p, "q": p / 8, "a": random.randint(2, 9), "b": random.randint(1, 9)}
    expected = random.choice(list(templates))
    return [split(texts.format(**numbers)) for texts in (expected, *templates[expected])]


def mathematics(random: Random, num_answers: int) -> Cases:
    values_N, numbers_N = ([value(random, templates) for _ in range(NUM_ROWS)] for templates in (MATH500, AIME))
    rows = [{"problem": "?", "solution": rf"So $\boxed{{{x}}}$.", "answer": x} for [x], *_ in values_N]
    numbers = [{"Problem": "?", "Answer": int(x)} for [x], *_ in numbers_N]
    names = "hendrycks_math/hendrycks_math500", "minerva_math/minerva_math500"
    sets = (
        (suite_of("math500", rows), values_N, {name: LMEvalTask(f"{name}.yaml", rows) for name in names}),
        (suite_of("aime", numbers), numbers_N, {"aime/aime24": LMEvalTask("aime/aime24.yaml", numbers)}),
    )
    cases: Cases = {}
    for index in range(num_answers):
        for suite, values, tasks in sets:
            row, known = index % NUM_ROWS, float(random.random() < 0.6)
            _, equal, unequal = values[row]
            final, other = random.choice(equal if known else unequal), random.choice(unequal)
            answer = random.choice(FRAMES).replace("%", other).replace("@", final)
            if not known and random.random() < 0.1:
                answer = random.choice(NO_ANSWER)
            ours = score(suite, row, answer)
            kind = "equal values that lm-eval calls wrong" if known else "unequal values that lm-eval calls right"
            for name, task in tasks.items():
                for metric, theirs in task.scores(row, answer).items():
                    rule = f"{suite.config.name}, {name.split('/')[1]} {metric.split()[1]}"
                    cases.setdefault(rule, []).append(Case(answer, ours, theirs, kind, known))
    return cases


# IFEval

WORDS = split("cat|Dog|well-known|the|it|sat on|café|Б|U")
LISTS = [["cat", "it"], ["Dog", "the"], ["well-known", "Б"], ["café", "sat on"], ["U"]]
RELATIONS, FEW = ("at least", "less than"), range(1, 5)
ARGUMENTS: dict[str, Sequence[Any]] = {
    "keywords": LISTS, "forbidden_words": LISTS, "keyword": WORDS, "frequency": FEW, "relation": RELATIONS,
    "letter": "acetxQ", "let_frequency": range(1, 9), "let_relation": RELATIONS, "num_words": range(1, 30),
    "num_sentences": range(1, 7), "num_paragraphs": (2, 3), "nth_paragraph": (1, 2), "first_word": ("cat", "Dog"),
    "num_bullets": FEW, "num_highlights": FEW, "num_placeholders": FEW, "num_sections": FEW,
    "section_spliter": ("SECTION", "Section", "Day"), "postscript_marker": ("P.S.", "P.P.S"),
    "prompt_to_repeat": ("Say it.", " Say: who, me? ", "Écris\nça"), "capital_frequency": FEW,
    "end_phrase": ("the end.", "Any other questions? ", "Peace!"), "capital_relation": RELATIONS,
}  # fmt: skip
COMMON = WORDS + split(
    "a|IT|x|q|#|!|.|?|;|e.g.|U.S.|don't|ß|漢字|1,000|3.5|７|-5|OK|so,|*|**|***|******|[|]|\"|\n|\n\n| \n |\t|\r\n|"
    "\u00a0|'|<<|>>|```|{|}|$|<b>|NASA's|I am here...|Der Hund schläft.|The cat sat on the mat.|Is that so?|"
    "\u2028|Le chat dort.|Mr. Smith said: no!|we all know that this is in English"
)
FENCES = split("@|@|```json\n@\n```|```\n@\n```|```JSON\n@```|```json @ ```|```@```|```json\n@|@\n```|```jSoN\n@\n```")
DOCUMENTS = split(
    '{}|[]|1|"a"|{"a": [1, 2.5, null]}|{"a": "```"}|{a: 1}|{"a": 1} so|NaN||{\'a\'}|[1,]|{"a": 1, "a": 2}'
)
KINDS = {
    "keywords:existence": "|".join(WORDS),
    "keywords:forbidden_words": "cats|Cat|_it|Dog's|un-the|cafés",
    "keywords:frequency": "|".join(WORDS),
    "keywords:letter_frequency": "cat|tea|exact|QQ|éa|Б",
    "keywords:letter_frequency of # or !": "#|!|##|a",
    "length_constraints:number_words": "it's|a b|_|-|x1|Б漢",
    "length_constraints:number_sentences": "So it is.|Is it?!|No. 5|Dr. Who.|We saw it at 3 p.m. today.",
    "length_constraints:number_paragraphs": "***|\n***\n| *** |one|one\n***\ntwo|****",
    "length_constraints:nth_paragraph_first_word": (
        "cat\n\ncat|\n\n|\n\n\n\n|\n\nCat, dog|\n\n'cat' is|\n\n\"Dog\"? yes|cat\n\nDog's|dog\n\ncat\n\nthe|\n\n\"'cat"
    ),
    "punctuation:no_comma": "، |，|yes|no.",
    "detectable_format:json_format": "|".join(filled(fence, [text]) for fence in FENCES for text in DOCUMENTS),
    "detectable_format:number_bullet_lists": "* one\n|\n- two|\n*\n|\n  * three|\n** no|\n—|\n-|\n+ a|*a|\n* a\n* b",
    "detectable_format:number_highlighted_sections": "*a b*|**c**|* *|** **|***d***|*e\nf*|__g__|**h*|*a***b**",
    "detectable_format:multiple_sections": (
        "SECTION 1|Section 2|Section3|\nDay 4\n|Day  5|SECTION\n6|Section Б|Day ٣|SECTION 1\na\nSECTION 2|Day 1. Day 2."
    ),
    "detectable_format:title": "<<a title>>|<<>>|<< >>|<<<b>>>|<<c\n>>|<<d>|>> <<|<<e>> <<f>>",
    "detectable_format:constrained_response": (
        "My answer is yes.|My answer is no.|My answer is maybe|my answer is no.|My answer is  no."
    ),
    "detectable_content:number_placeholders": "[name]|[]|[a\nb]|[[c]]|[d|e]|[f](g)|［h］",
    "detectable_content:postscript": "P.S. so|P. S. so|P.P.S so|P. P. S.|PS: so|p.s.|P.S|P.P.S.|\nP.  S.",
    "combination:two_responses": "one|two|******|\n******\n|*****|*******|one\n******\ntwo|one ****** one",
    "combination:repeat_prompt": "Say it.|say it|Say: who, me?|SAY IT.|Écris\nça|Écris ça",
    "startend:end_checker": ('The end.|the end."|the end|Any other questions?|PEACE!|Peace!**|Peace! |"the end." '),
    "startend:quotation": '"|"|"|"so"|“|”|\'\'| " ',
    "change_case:english_lowercase": "this is all in english|the small words|İ|ŉ|so it is, my friend",
    "change_case:english_capital": "THIS IS ALL IN ENGLISH|THE BIG WORDS|ẞ|Ⅻ|SO IT IS, MY FRIEND",
    "change_case:capital_word_frequency": "NASA|I|A|U.S.|X-RAY|IT'S|Ok|C3PO|THE END.",
}
"""Kinds of constraints, and pieces of text that matter to them."""
ON_PURPOSE = {
    "change_case:english_lowercase": "all is lowercase, but langdetect says that it is no English",
    "change_case:english_capital": "all is capital, but langdetect says that it is no English",
    "keywords:letter_frequency of # or !": "the sign is counted; lm-eval draws a letter instead",
    "length_constraints:number_sentences": "sentences are split without NLTK's language model",
    "change_case:capital_word_frequency": "words are split otherwise, such as X-RAY, IT'S and U.S.",
}


def ifeval_answer(random: Random, pieces: Sequence[str]) -> str:
    count = random.choice((0, 1, 1, 2, 3, 5, 8, 20))
    chosen = [random.choice(pieces if random.random() < 0.6 else COMMON) for _ in range(count)]
    text = "".join(piece + random.choice(("", " ", " ", "\n", "\n\n")) for piece in chosen)
    cased = random.choice((str, str, str.lower, str.upper))(text)
    return cased * 300 if random.random() < 0.003 else cased


def ifeval(random: Random, num_answers: int) -> Cases:
    import_module("langdetect").DetectorFactory.seed = 0
    left_out: set[str] = set()
    try:
        import_module("nltk").data.find("tokenizers/punkt_tab/english")
    except LookupError:
        left_out = {"length_constraints:number_sentences", "change_case:capital_word_frequency"}
    return {f"ifeval {name}": list(constraint(random, num_answers, name)) for name in KINDS if name not in left_out}


def constraint(random: Random, num_answers: int, name: str) -> Iterable[Case]:
    identifier, utils = name.split()[0], import_module("lm_eval.tasks.ifeval.utils")
    keys = utils.instructions_registry.INSTRUCTION_DICT[identifier](identifier).get_instruction_args_keys()
    values = ARGUMENTS | ({"letter": "#!"} if "#" in name else {})
    tables = [{key: random.choice(values[key]) for key in keys} for _ in range(NUM_ROWS)]
    rows = [{"key": 0, "prompt": "?", "instruction_id_list": [identifier], "kwargs": [table]} for table in tables]
    suite = suite_of("ifeval", rows)
    for row in (index % NUM_ROWS for index in range(num_answers)):
        answer = ifeval_answer(random, split(KINDS[name]))
        result = utils.test_instruction_following_strict(utils.InputExample(**rows[row]), answer)
        ours, theirs = score(suite, row, answer), float(result.follow_all_instructions)
        is_meant = ours > theirs or "english" not in name  # lm-eval asks for the language besides
        yield Case(answer, ours, theirs, ON_PURPOSE.get(name, "") if is_meant else "")


# estimators


def estimators(random: Random, num_cases: int) -> Cases:
    pass_at_k = vars(import_module("lm_eval.tasks.cruxeval.utils"))["_pass_at_k"]
    mean = import_module("lm_eval.api.metrics").mean
    cases: Cases = {"pass@k": [], "pass@k by exact fractions": [], "avg@n": []}
    for _ in range(num_cases):
        n = random.randint(1, 256)
        c, k = random.randint(0, random.choice((n, min(n, 3)))), random.randint(1, random.choice((n, min(n, 8))))
        wrong = math.prod((1 - Fraction(k, i) for i in range(n - c + 1, n + 1)), start=Fraction(n - c >= k))
        ours, name = pass_at(k, n, c), f"n = {n}, c = {c}, k = {k}"
        cases["pass@k"].append(Case(name, ours, float(pass_at_k(n, c, k))))
        cases["pass@k by exact fractions"].append(Case(name, ours, float(1 - wrong)))
        right = [[float(random.random() < 0.4) for _ in range(n)] for _ in range(random.randint(1, 20))]
        average = estimate([sum(answers) / n for answers in right], f"avg@{n}").value
        cases["avg@n"].append(Case(f"{len(right)} questions, n = {n}", average, float(mean(sum(right, [])))))
    return cases


def report(cases: Cases) -> bool:
    """Print the table, and each kind of difference with three answers. True if nothing failed."""
    print(f"{'rule':55}{'answers':>9}{'score':>8}{'equal':>9}{'different':>11}")
    for rule, found in cases.items():
        different, share = sum(case.is_different for case in found), sum(case.theirs for case in found) / len(found)
        verdict = "FAILED" if any(case.is_failure for case in found) else "differs by design" if different else ""
        line = f"{rule:55}{len(found):9,}{share:8.1%}{len(found) - different:9,}{different:11,}  {verdict}"
        print(line.rstrip())
    for rule, found in cases.items():
        kinds: dict[str, list[Case]] = {}
        for case in sorted(found, key=lambda case: len(case.answer)):
            if case.is_failure or case.is_different:
                kinds.setdefault("FAILED" if case.is_failure else case.kind, []).append(case)
        for kind, of_kind in kinds.items():
            print(f"\n{rule}: {len(of_kind):,} answers, {kind}")
            for case in of_kind[:: max(len(of_kind) // 3, 1)][:3]:
                text = case.answer if len(case.answer) < 150 else f"{case.answer[:70]} ... {case.answer[-70:]}"
                print(f"    {case.ours:g} here, {case.theirs:g} by lm-eval: {text!r}")
    return not any(case.is_failure for found in cases.values() for case in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--answers", type=int, default=20_000, help="a rule; a twentieth of mathematics and estimators")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.answers < NUM_ROWS:
        parser.error(f"--answers is {options.answers}: give {NUM_ROWS} or more")
    os.environ |= {"LOCAL_RANK": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}  # lm-eval downloads in rank 0 alone
    try:
        if (installed := version("lm-eval")) != LM_EVAL:
            parser.error(f"lm-eval {installed} is installed: take {LM_EVAL}")
        import_module("lm_eval.tasks.minerva_math.utils")
    except (ImportError, AssertionError) as error:
        parser.error(f"{error}: run it as its docstring says")
    logging.disable(logging.ERROR)
    import_module("random").seed(options.seed)  # of which lm-eval draws
    shares = {gsm8k: 1, multiple_choice: 1, mathematics: 20, ifeval: 1, estimators: 20}
    parts = [part(Random(options.seed), options.answers // share) for part, share in shares.items()]
    return 0 if report({rule: found for part in parts for rule, found in part.items()}) else 1


if __name__ == "__main__":
    sys.exit(main())
