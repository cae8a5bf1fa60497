"""Verifiable constraints on an answer's text, by the identifiers of IFEval. Pure.

Source: Zhou et al. 2023, arXiv 2311.07911. Keywords and phrases of a row are literal text, never patterns. Sentences
are counted by their final punctuation, without a language's rules.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from titan_rl.config.io.bounded_files import parse_json

Constraint = Callable[..., bool]
"""Whether a text keeps to it; further arguments by the names of IFEval's ``kwargs``."""
_RELATIONS: Mapping[str, Callable[[int, int], bool]] = {
    "at least": lambda count, bound: count >= bound,
    "less than": lambda count, bound: count < bound,
}

_FENCES = ("```json", "```Json", "```JSON", "```")
_POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
"""Patterns of the set's two markers, in lower case."""


def _holds(count: int, relation: str, bound: int) -> bool:
    """Errors: ValueError for an unknown relation."""
    if relation not in _RELATIONS:
        raise ValueError(f"the relation {relation!r} is unknown: {' or '.join(_RELATIONS)}")
    return _RELATIONS[relation](count, bound)


def _occurrences(text: str, phrase: str) -> int:
    return len(re.findall(re.escape(phrase), text, re.IGNORECASE))


def has_keywords(text: str, keywords: list[str]) -> bool:
    return all(_occurrences(text, word) for word in keywords)


def lacks_words(text: str, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def keyword_count(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _holds(_occurrences(text, keyword), relation, frequency)


def letter_count(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _holds(text.lower().count(letter.lower()), let_relation, let_frequency)


def word_count(text: str, num_words: int, relation: str) -> bool:
    return _holds(len(re.findall(r"\w+", text)), relation, num_words)


def sentence_count(text: str, num_sentences: int, relation: str) -> bool:
    sentences = [part for part in re.split(r"(?<=[.!?])\s+", text.strip()) if re.search(r"\w", part)]
    return _holds(len(sentences), relation, num_sentences)


def paragraph_count(text: str, num_paragraphs: int) -> bool:
    """Paragraphs between lines of three asterisks; an empty one at either end does not count."""
    paragraphs = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    inner = paragraphs[1:-1]
    return all(inner) and sum(map(bool, paragraphs)) == num_paragraphs


def first_word_of_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs between empty lines; further empty lines are paragraphs that are numbered and not counted."""
    paragraphs = [part.strip() for part in text.split("\n\n")]
    if sum(map(bool, paragraphs)) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    words = paragraphs[nth_paragraph - 1].split()
    if not words:
        return False
    word = words[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def has_no_comma(text: str) -> bool:
    return "," not in text


def is_json(text: str) -> bool:
    """Whether the whole answer is JSON; marks of a fenced block around it, closed or not, do not count."""
    inside = text.strip()
    for mark in _FENCES:
        inside = inside.removeprefix(mark)
    try:
        parse_json(inside.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def bullet_count(text: str, num_bullets: int) -> bool:
    """Lines that begin with a star or a dash; both are looked for one after the other."""
    stars = re.findall(r"^\s*\*[^*].*$", text, re.MULTILINE)
    dashes = re.findall(r"^\s*-.*$", text, re.MULTILINE)
    return len(stars) + len(dashes) == num_bullets


def highlight_count(text: str, num_highlights: int) -> bool:
    """Sections between asterisks; single and double ones are looked for one after the other."""
    found = re.findall(r"\*[^\n*]*\*", text) + re.findall(r"\*\*[^\n*]*\*\*", text)
    return sum(bool(section.strip("*").strip()) for section in found) >= num_highlights


def section_count(text: str, section_spliter: str, num_sections: int) -> bool:
    """Sections with numbered headings, such as ``SECTION 1``."""
    return len(re.findall(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", text)) >= num_sections


def placeholder_count(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\]\n]*\]", text)) >= num_placeholders


def has_title(text: str) -> bool:
    """Whether a line has ``<<`` and, behind something else, ``>>``."""
    titles = (line[line.find("<<") : line.rfind(">>") + 2] for line in text.split("\n") if "<<" in line)
    return any(len(title) > 4 and title.lstrip("<").rstrip(">").strip() for title in titles)


def has_postscript(text: str, postscript_marker: str) -> bool:
    """Whether the marker is there; P.S. and P.P.S may have a space behind their full stops."""
    marker = postscript_marker.strip()
    return re.search(_POSTSCRIPTS.get(marker, re.escape(marker.lower())), text.lower()) is not None


def is_one_of_the_allowed(text: str) -> bool:
    options = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
    return any(option in text.strip() for option in options)


def are_two_answers(text: str) -> bool:
    """Two different answers between which stand six asterisks."""
    parts = [part.strip() for part in text.split("******")]
    inner = [part for number, part in enumerate(parts) if part or 0 < number < len(parts) - 1]
    return len(inner) == 2 and all(inner) and inner[0] != inner[1]


def repeats_the_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def is_quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def is_lowercase(text: str) -> bool:
    return text.islower()


def is_uppercase(text: str) -> bool:
    return text.isupper()


def capital_word_count(text: str, capital_frequency: int, capital_relation: str) -> bool:
    words = re.findall(r"\w+(?:[-.]\w+)*", text)
    return _holds(sum(word.isupper() for word in words), capital_relation, capital_frequency)


CONSTRAINTS: Mapping[str, Constraint] = {
    "keywords:existence": has_keywords,
    "keywords:forbidden_words": lacks_words,
    "keywords:frequency": keyword_count,
    "keywords:letter_frequency": letter_count,
    "length_constraints:number_words": word_count,
    "length_constraints:number_sentences": sentence_count,
    "length_constraints:number_paragraphs": paragraph_count,
    "length_constraints:nth_paragraph_first_word": first_word_of_paragraph,
    "punctuation:no_comma": has_no_comma,
    "detectable_format:json_format": is_json,
    "detectable_format:number_bullet_lists": bullet_count,
    "detectable_format:number_highlighted_sections": highlight_count,
    "detectable_format:multiple_sections": section_count,
    "detectable_format:title": has_title,
    "detectable_format:constrained_response": is_one_of_the_allowed,
    "detectable_content:number_placeholders": placeholder_count,
    "detectable_content:postscript": has_postscript,
    "combination:two_responses": are_two_answers,
    "combination:repeat_prompt": repeats_the_prompt,
    "startend:end_checker": ends_with,
    "startend:quotation": is_quoted,
    "change_case:english_lowercase": is_lowercase,
    "change_case:english_capital": is_uppercase,
    "change_case:capital_word_frequency": capital_word_count,
}
"""By IFEval's identifier."""
UNVERIFIED = frozenset({"language:response_language"})
"""IFEval's other identifiers, which take a classifier."""


def keeps(text: str, identifier: str, arguments: Mapping[str, Any]) -> bool:
    """Whether an answer keeps to a constraint; an empty answer keeps to none. ``arguments``: None counts as left out.

    Errors: KeyError for an unknown identifier; TypeError, ValueError or AttributeError for arguments that are not its.
    """
    given = {name: _whole(value) for name, value in arguments.items() if value is not None}
    kept = CONSTRAINTS[identifier](text, **given)
    return kept and bool(text.strip())


def _whole(value: Any) -> Any:
    """A count, which Parquet has as 3.0 beside a missing cell, as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def arguments_of(value: Any) -> Mapping[str, Any]:
    """Arguments of a row, as a table or as JSON of one. Errors: ValueError."""
    table = json.loads(value) if isinstance(value, str) else value
    if not isinstance(table or {}, dict):
        raise ValueError("not a table")
    return table or {}
