"""Libraries for services: URLs, version numbers."""

from random import Random

from repository import Library


def _query(r: Random) -> str:
    pairs = [f"{r.choice('abc')}={r.choice(('1', 'x+y', '', 'a%20b', '%41'))}" for _ in range(r.randint(0, 4))]
    return "&".join(pairs + r.choice(([], [], ["flag"])))


def _url(r: Random) -> str:
    scheme, host = r.choice(("http", "HTTPS", "ftp")), r.choice(("example.org", "Example.COM", "a.b.net"))
    port = r.choice(("", "", ":80", ":8080", ":443"))
    path = r.choice(("", "/", "/a/b", "/a/../c", "/x/./y/", "/a//b"))
    query = _query(r)
    return f"{scheme}://{host}{port}{path}" + (f"?{query}" if query else "") + r.choice(("", "", "#top"))


URLS = Library(
    name="urls",
    about="<<Parts of URLs, and their queries|Splitting, joining and normalizing of web addresses>>",
    names="""
        webaddress: addresses linkparts; query_mod: parameters query_string; address_mod: splitting parts_mod
        decode_percent: unquoted percent_decoded; encode_percent: quoted_text percent_encoded
        parse_query: query_values read_query; build_query: query_from write_query; split_url: url_parts dissect
        normalize_path: clean_path resolved_path; normalize_url: canonical_url tidy_url
        same_site: same_origin is_same_site; join_path: path_join resolve_path; address: url link
    """,
    files={
        "webaddress/query_mod.py": r'''"""<<Queries of URLs|What stands behind the question mark>>."""

SAFE = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.~"


def encode_percent(text):
    """<<Text with all but letters, digits and -_.~ as percent signs and two capital hex digits|Encode a text>>."""
    return "".join(chr(byte) if chr(byte) in SAFE else f"%{byte:02X}" for byte in text.encode())


def decode_percent(text):
    """<<Text with percent codes and plus signs, which are blanks, decoded|Decode a part of a query>>."""
    raw = bytearray()
    position = 0
    while position < len(text):
        letter = text[position]
        if letter == "%" and len(text) - position > 2:
            raw.append(int(text[position + 1 : position + 3], 16))
            position += 3
            continue
        raw.extend(b" " if letter == "+" else letter.encode())
        position += 1
    return raw.decode(errors="replace")


def parse_query(query):
    """<<List of values for each name; a name alone has an empty value|Read a query>>."""
    result = {}
    for part in query.split("&"):
        if part:
            name, _, value = part.partition("=")
            result.setdefault(decode_percent(name), []).append(decode_percent(value))
    return result


def build_query(values):
    """<<Query of names with lists of values, sorted by name|Write a query>>; names without values are left out."""
    pairs = []
    for name in sorted(values):
        for value in values[name]:
            pairs.append(f"{encode_percent(name)}={encode_percent(value)}")
    return "&".join(pairs)
''',
        "webaddress/address_mod.py": r'''"""<<Whole URLs|Splitting and normalizing>>."""

from .query_mod import build_query, parse_query

PORTS = {"http": 80, "https": 443, "ftp": 21}


def split_url(address):
    """<<Dict of scheme, host, port, path, query and fragment|Parts of a URL>>; without a port the scheme's own."""
    rest, _, fragment = address.partition("#")
    rest, _, query = rest.partition("?")
    scheme, _, rest = rest.partition("://")
    place, slash, path = rest.partition("/")
    host, _, port = place.partition(":")
    return {
        "scheme": scheme.lower(),
        "host": host.lower(),
        "port": int(port) if port else PORTS.get(scheme.lower()),
        "path": slash + path,
        "query": query,
        "fragment": fragment,
    }


def normalize_path(path):
    """<<Path from the root without empty parts, . and ..|Clean up a path>>; a slash at its end stays."""
    parts = []
    for part in path.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    end = "/" if path.endswith("/") and parts else ""
    return "/" + "/".join(parts) + end


def join_path(base, relative):
    """<<Path that a link means on a page|Resolve a path against that of a page>>."""
    if relative.startswith("/"):
        return normalize_path(relative)
    folder = base[: base.rfind("/") + 1]
    return normalize_path(folder + relative)


def normalize_url(address):
    """<<One form for equal URLs: sorted query, no fragment, no port that is the scheme's own|Canonical form>>."""
    parts = split_url(address)
    own = PORTS.get(parts["scheme"]) == parts["port"]
    port = "" if own or parts["port"] is None else f":{parts['port']}"
    query = build_query(parse_query(parts["query"]))
    place = parts["scheme"] + "://" + parts["host"] + port + normalize_path(parts["path"])
    return place + ("?" + query if query else "")


def same_site(first, second):
    """<<Whether scheme, host and port are equal|Whether two URLs have one origin>>."""
    a, b = split_url(first), split_url(second)
    return all(a[part] == b[part] for part in ("scheme", "host", "port"))
''',
    },
    calls={
        "encode_percent": lambda r: ["".join(r.choices(("a", " ", "Z", "/", "\u00fc", "~", "%", "-", "?", "\n"), k=4))],
        "decode_percent": lambda r: [
            "".join(r.choices(("a", "+", "%20", "b", "%C3%BC", "%41", "%"), k=r.randint(1, 5)))
        ],
        "parse_query": lambda r: [_query(r) + r.choice(("", "&", "&b=1=2"))],
        "build_query": lambda r: [
            {name: r.choices(("1", "x y", ""), k=r.randint(0, 2)) for name in r.sample("bca", 3)}
        ],
        "split_url": lambda r: [_url(r)],
        "normalize_path": lambda r: ["/".join(r.choices(("", "a", "b", ".", ".."), k=r.randint(1, 6)))],
        "join_path": lambda r: [r.choice(("/a/b", "/a/b/", "/", "/x")), r.choice(("c", "/d", "../e", "./f", "", "g/"))],
        "normalize_url": lambda r: [_url(r)],
        "same_site": lambda r: (
            [r.choice(("http://a.org", "HTTP://A.org:80/x", "https://a.org", "http://a.org:8080"))] * 2
            if r.random() < 0.2
            else [_url(r), r.choice(("http://example.org/", "http://example.org:8080", "https://a.b.net"))]
        ),
    },
    bugs=r"""
hex-case: f"%{byte:02X}" => f"%{byte:02x}"
    Encoded bytes have small hex digits.
    Percent codes are not in capitals.
plus: b" " if letter == "+" else letter.encode() => letter.encode()
    Plus signs in queries are not turned into blanks.
    A blank that was sent as a plus comes back as a plus.
short-code: if letter == "%" and len(text) - position > 2: => if letter == "%" and len(text) - position > 3:
    A percent code at the very end stays as it is.
    The last character of a text is not decoded if it is encoded.
repeated: result.setdefault(decode_percent(name), []) => result.setdefault(decode_percent(name), [])[:]
    Of a name that occurs several times only the last value is kept.
    Repeated parameters overwrite each other.
order: for name in sorted(values): => for name in values:
    The order of a query that is built depends on the order of the dict.
    Parameters are not sorted.
fragment: rest, _, fragment = address.partition("#") => rest, _, fragment = address.partition("#!")
    The fragment is taken for a part of the query or of the path.
    What follows a hash sign is not split off.
host-case: "host": host.lower(), => "host": host,
    Hosts that differ in case are different.
    The name of the host is not put into small letters.
up: parts = parts[:-1] => parts = parts[:1]
    Two dots in a path go up to the wrong folder.
    Going up removes the wrong parts of a path.
end-slash: if path.endswith("/") and parts else "" => if path.endswith("/") else ""
    The root has two slashes.
    An empty path that ends with a slash becomes a double slash.
folder: folder = base[: base.rfind("/") + 1] => folder = base + "/"
    Links are resolved below the page and not beside it.
    Relative links keep the name of the page as a folder.
own-port: port = "" if own or => port = "" if not own or
    The ordinary port is written, and others are not.
    Ports that matter vanish from addresses.
""",
)


def _version(r: Random) -> str:
    text = ".".join(str(r.choice((0, 1, 2, 9, 10, 12))) for _ in range(r.randint(1, 3)))
    return r.choice(("", "", "v")) + text + r.choice(("", "", "", "-rc1", "-beta2", "-rc10"))


VERSIONS = Library(
    name="versions",
    about="<<Comparison of version numbers|Order of versions, and ranges of them>>",
    names="""
        releases: verscheck versionkit; reading_mod: numbers_mod parts_mod
        ranges_mod: constraints_mod requirements_mod; parse_version: read_version version_parts
        sort_key: ordering_key comparable; compare: compare_versions order_of; latest: newest highest_version
        bump: raised next_version; matches: satisfies fits; best_match: pick_version choose
        is_stable: is_final no_prerelease; stage: label suffix; version: release tag
    """,
    files={
        "releases/reading_mod.py": '''"""<<Versions and their order|Reading versions>>."""

import re

STAGES = {"alpha": 0, "beta": 1, "rc": 2, "": 3}
SHAPE = re.compile(r"v?([0-9]+(?:[.][0-9]+){0,2})(?:-(alpha|beta|rc)([0-9]*))?")


def parse_version(version):
    """<<Three numbers, the stage and its number, in a list|Parts of a version>>; missing numbers are 0."""
    match = SHAPE.fullmatch(version.strip())
    if match is None:
        raise ValueError("no version")
    numbers = [int(part) for part in match[1].split(".")]
    numbers += [0] * (3 - len(numbers))
    return [*numbers, match[2] or "", int(match[3] or 0)]


def sort_key(version):
    """<<List that sorts as versions do: alpha, beta, rc, final|Key to sort versions by>>."""
    *numbers, stage, number = parse_version(version)
    return [*numbers, STAGES[stage], number]


def is_stable(version):
    """<<Whether a version is final, and not below 1|Check for a stable version>>."""
    parts = parse_version(version)
    return parts[3] == "" and parts[0] >= 1


def compare(first, second):
    """<<-1, 0 or 1, as the first is older, equal or newer|Compare two versions>>."""
    a, b = sort_key(first), sort_key(second)
    return (a > b) - (a < b)


def latest(versions, stable_only=False):
    """<<Newest version, as it is written; None if there is none|Find the newest version>>."""
    found = [item for item in versions if not stable_only or is_stable(item)]
    return max(found, key=sort_key, default=None)
''',
        "releases/ranges_mod.py": '''"""<<Ranges and changes of versions|Which versions are wanted>>."""

import re

from .reading_mod import compare, latest, parse_version


def bump(version, part):
    """<<Next major, minor or patch version, with zeros behind it|Raise a part of a version>>; stages are dropped."""
    major, minor, patch_number, stage, _ = parse_version(version)
    if part == "major":
        return f"{major + 1}.0.0"
    if part == "minor":
        return f"{major}.{minor + 1}.0"
    return f"{major}.{minor}.{patch_number if stage else patch_number + 1}"


def matches(version, constraint):
    """<<Whether a version meets all parts of a text such as >=1.2, <2|Check a version>>; ^ and ~ are known."""
    for part in constraint.split(","):
        sign, bound = re.fullmatch(r"[ ]*(>=|<=|==|!=|>|<|[\\^]|~)?[ ]*(.+?)[ ]*", part).groups()
        order = compare(version, bound)
        if sign in ("^", "~"):
            end = bump(bound, "major" if sign == "^" else "minor")
            good = order >= 0 and compare(version, end) < 0
        else:
            good = {">=": order >= 0, "<=": order <= 0, "!=": order != 0, ">": order > 0, "<": order < 0}.get(
                sign, order == 0
            )
        if not good:
            return False
    return True


def best_match(versions, constraint):
    """<<Newest of the versions that meet a constraint, None without one|Choose a version>>."""
    return latest([item for item in versions if matches(item, constraint)])
''',
    },
    calls={
        "parse_version": lambda r: [r.choice((_version(r), f" {_version(r)}"))],
        "sort_key": lambda r: [_version(r)],
        "is_stable": lambda r: [_version(r)],
        "compare": lambda r: [_version(r), _version(r)],
        "latest": lambda r: [[_version(r) for _ in range(r.randint(0, 5))], r.choice((True, False))],
        "bump": lambda r: [_version(r), r.choice(("major", "minor", "patch"))],
        "matches": lambda r: [
            f"{r.randint(0, 2)}.{r.randint(0, 2)}",
            r.choice((">", "<", ">=", "<=", "==", "!=", "^", "~", "", ">=0.1, <"))
            + f"{r.randint(0, 2)}.{r.randint(0, 2)}",
        ],
        "best_match": lambda r: [[_version(r) for _ in range(6)], r.choice(("^1.0", "~2.1", ">=1,<9", "<2", "!=1.0"))],
    },
    bugs=r"""
stage-order: "alpha": 0, "beta": 1, "rc": 2, "": 3} => "alpha": 0, "beta": 2, "rc": 1, "": 3}
    Release candidates are older than betas.
    Beta versions win against release candidates.
final: "rc": 2, "": 3} => "rc": 2, "": -1}
    Final versions are older than their own release candidates.
    A version without a stage sorts before its alphas.
missing: numbers += [0] * (3 - len(numbers)) => numbers += [0] * (2 - len(numbers))
    Versions with fewer than three numbers are not filled up.
    Short versions lack a number.
stage-number: int(match[3] or 0)] => int((match[3] or "0")[0])]
    Only the first digit of a stage's number counts.
    The tenth release candidate is the first one.
stable: return parts[3] == "" and parts[0] >= 1 => return parts[3] == "" or parts[0] >= 1
    Release candidates are called stable.
    Versions below 1 are called stable if they are final.
first-stable: and parts[0] >= 1 => and parts[0] > 1
    Version 1 is not called stable.
    The first major version does not count as stable.
only-stable: if not stable_only or is_stable(item)] => if stable_only or is_stable(item)]
    The option for stable versions has the opposite effect.
    The newest version is unstable although stable ones are asked for.
newest: return max(found, key=sort_key, default=None) => return max(found, default=None)
    The newest version is the last one of the alphabet.
    Version 9 is newer than version 10.
final-patch: {patch_number if stage else patch_number + 1}" => {patch_number + 1}"
    After a release candidate the next patch skips its final version.
    Raising the patch of an rc goes one too far.
caret: "major" if sign == "^" else "minor" => "minor" if sign == "^" else "major"
    The caret allows too little, the tilde too much.
    A caret stays within the minor version.
all-parts: if not good:\n            return False => if not good:\n            break
    Constraints that do not hold are said to hold.
    Not all parts of a constraint have to hold.
""",
)


LIBRARIES = [URLS, VERSIONS]
