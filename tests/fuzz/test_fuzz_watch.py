"""The watch page: who may see it, and what its address may say."""

import asyncio
import tempfile
from functools import cache
from pathlib import Path
from urllib.parse import parse_qs, urlencode

import made_run
from fuzzing import ANY_TEXT, fuzz, mutated
from hypothesis import strategies as st

from titan_rl.diagnostics.web.data.index import RolloutIndex
from titan_rl.diagnostics.web.data.selection import COLUMNS, RANGES, selection_of
from titan_rl.diagnostics.web.guard import Guard

TOKEN, PORT = "t" * 32, 4711
COOKIE = f"titan_rl_{PORT}={TOKEN}".encode()
NAMES = st.sampled_from([b"host", b"origin", b"cookie", b"x-forwarded-host", b"referer"])
NEAR = [COOKIE, b"127.0.0.1:4711", b"localhost:4711", b"http://127.0.0.1:4711", b"127.0.0.1", b"null"]
HEADERS = st.lists(st.tuples(NAMES, st.binary(max_size=40) | st.sampled_from(NEAR).flatmap(mutated)), max_size=4)


def as_text(data: bytes) -> str:
    return data.decode(errors="replace")


PATHS = ANY_TEXT.map("/{}".format) | st.just(f"/{TOKEN}/".encode()).flatmap(mutated).map(as_text) | ANY_TEXT
QUERY = st.binary(max_size=40) | st.just(f"token={TOKEN}".encode()).flatmap(mutated)


@fuzz(kind=st.sampled_from(["http", "websocket"]), path=PATHS, query=QUERY, headers=HEADERS)
def test_nobody_passes_without_the_secret_or_from_elsewhere(kind, path, query, headers):
    seen, sent = [], []

    async def page(scope, receive, send):
        seen.append(scope)

    async def send(message):
        sent.append(message)

    guard = Guard(page, TOKEN, PORT)
    scope = {"type": kind, "path": path, "headers": headers, "query_string": query}
    asyncio.run(guard(scope, None, send))
    assert bool(seen) != bool(sent)
    if not seen:
        assert sent[0] == {"type": "websocket.close", "code": 1008} or sent[0]["status"] == 403
        return
    given = dict(headers)
    assert given[b"host"] in (b"127.0.0.1:4711", b"localhost:4711")
    assert given.get(b"origin", b"http://" + given[b"host"]) == b"http://" + given[b"host"]
    assert any(TOKEN.encode() in place for place in (path.encode(errors="replace"), query, given.get(b"cookie", b"")))


@cache
def index() -> tuple[RolloutIndex, tempfile.TemporaryDirectory]:
    """Of a run of two steps, and the folder that it is in as long as somebody has it."""
    folder = tempfile.TemporaryDirectory()
    run_dir = made_run.made_run(Path(folder.name, "run"), checkpoint=0)
    (found := RolloutIndex(run_dir)).refresh()
    return found, folder


WHAT = [f"{end}_{name}" for name in RANGES for end in ("least", "most")]
PARAMETERS = st.sampled_from(["text", "status", "task", "outcome", "sort", "groups", *WHAT])
SAID = ANY_TEXT | st.sampled_from(
    ["1", "-step", *COLUMNS, "trained", "discarded", "' or 1=1 --", "nan", "inf", "1e999"]
)


@fuzz(query=st.dictionaries(PARAMETERS | ANY_TEXT, SAID | st.floats().map(str), max_size=5))
def test_any_address_is_a_selection(query):
    selection = selection_of(query)
    page = index()[0].page(selection, 0, 5)
    assert len(page.rows) <= 5
    told = selection.as_query()
    again = dict(parse_qs(urlencode(told, errors="replace"), keep_blank_values=True))
    assert selection_of({name: value for name, [value] in again.items()}).sort == selection.sort
