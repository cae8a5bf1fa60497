"""Images of workspaces: file trees that nobody changes any more, kept by what is in them.

    a folder, files of a row      ─▶ laid at /workspace, beside the host's programs
    a tar archive, an OCI layout  ─▶ the whole file system, with programs of its own

Each is laid out once, in a store of this user's.
"""

import hashlib
import json
import os
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any

from titan_rl.config.io.bounded_files import RefusedFile, open_file, read_json
from titan_rl.config.load import ConfigError

FOLDER = "/workspace"
"""Of a folder's files, and where commands run."""
_NOBODY = 65534
_PLACES = ("etc", "proc", "dev", "tmp", "root", "var", "run", "usr", "bin", "sbin", "lib", "python")
_MOUNTED = ("proc", "dev", "tmp")
"""Of these, folders and no links."""
_MOST_BYTES = 1 << 20
"""Of an index or a manifest."""
_PIECE = 1 << 20
_ZSTD = b"\x28\xb5\x2f\xfd"
_MOST_DEEP = 100
"""Folders in folders; what is deeper is hard to remove."""
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_FORM = "2"
"""Of the store: a tree that was laid out otherwise is another one."""


@dataclass(frozen=True)
class Image:
    """File tree of the store."""

    digest: str
    """Its name there."""
    folder: str = FOLDER
    """In which commands run."""
    uses_host_programs: bool = True
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def shell(self) -> list[str]:
        """Shell, which takes a line behind it."""
        if self.uses_host_programs:
            return [str(Path("/bin/bash").resolve()), "-c"]
        tree = image_store() / self.digest
        has_bash = any((tree / place).exists() for place in ("bin/bash", "usr/bin/bash"))
        return ["/bin/bash" if has_bash else "/bin/sh", "-c"]


def image_store() -> Path:
    """Folder of all images, this user's alone."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    store = base / "titan_rl" / "images"
    if not store.is_dir():
        store.mkdir(parents=True, exist_ok=True)
        store.chmod(0o700)
        _give(store)
    return store


def _give(path: Path) -> None:
    """Root's workspaces belong to nobody."""
    if os.geteuid() == 0:
        os.chown(path, _NOBODY, _NOBODY, follow_symlinks=False)


# folders and files


def image_of_files(files: Mapping[str, bytes]) -> Image:
    """Image of files by their paths below ``FOLDER``. Errors: ConfigError for a path that leaves it."""
    digest = hashlib.sha256(f"files {_FORM}".encode())
    for path in sorted(files):
        check_path(path)
        digest.update(f"\0{path}\0{len(files[path])}\0".encode() + files[path])
    name = digest.hexdigest()[:32]
    with _laid_out(name) as tree:
        if tree is not None:
            _lay_skeleton(tree)
            for path, content in files.items():
                file = tree / FOLDER[1:] / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
                file.chmod(0o755 if content.startswith(b"#!") else 0o644)
    return Image(name)


def check_path(path: str) -> None:
    """Errors: ConfigError."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"a workspace's file {path!a:.100} has a name that is no text: give another one") from None
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
        raise ConfigError(f"a workspace's file {path!r:.100} is outside of it: give a path below its folder")
    _check_depth(len(pure.parts), f"a workspace's file {path!r:.100}")


def image_of_folder(folder: Path) -> Image:
    """Image of a folder's files. Errors: ConfigError for one that is not there."""
    if not folder.is_dir():
        raise ConfigError(f"the workspace {str(folder)!r} is no folder")
    digest = hashlib.sha256(f"folder {_FORM}".encode())
    for path, info in _walk(folder):
        digest.update(b"\0%s\0%d\0" % (os.fsencode(path.relative_to(folder)), info.st_mode))
        digest.update(os.fsencode(os.readlink(path)) if path.is_symlink() else _digest_of(path))
    name = digest.hexdigest()[:32]
    with _laid_out(name) as tree:
        if tree is not None:
            _lay_skeleton(tree)
            top = tree / FOLDER[1:]
            for path, info in _walk(folder):
                _copy(path, info, top / path.relative_to(folder))
    return Image(name)


def _walk(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Files, links and folders, in one order; what else there is, is left out. Errors: ConfigError."""
    waiting = [folder]
    while waiting:
        for path in sorted(waiting.pop().iterdir()):
            info = path.lstat()
            if stat.S_ISDIR(info.st_mode):
                _check_depth(len(path.relative_to(folder).parts), str(folder))
                waiting.append(path)
            if stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode) or stat.S_ISDIR(info.st_mode):
                yield path, info


def _check_depth(depth: int, name: str) -> None:
    """Errors: ConfigError."""
    if depth > _MOST_DEEP:
        raise ConfigError(f"{name} has folders in folders {_MOST_DEEP} deep and deeper: no workspace is made of that")


def _digest_of(path: Path) -> bytes:
    if path.is_dir():
        return b""
    digest = hashlib.sha256()
    with _opened(path) as file:
        while part := file.read(_PIECE):
            digest.update(part)
    return digest.digest()


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Errors: ConfigError."""
    try:
        with open_file(path, may_be_sparse=True) as file:
            yield file
    except (RefusedFile, FileNotFoundError, PermissionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _copy(path: Path, info: os.stat_result, to: Path) -> None:
    if path.is_symlink():
        to.symlink_to(os.readlink(path))
    elif path.is_dir():
        to.mkdir(exist_ok=True)
    else:
        with _opened(path) as source, to.open("xb") as file:
            shutil.copyfileobj(source, file)
        to.chmod(info.st_mode & 0o777 | 0o600)


def _lay_skeleton(tree: Path) -> None:
    """Folders that a file system has, for programs of the host."""
    _lay_places(tree)
    (tree / FOLDER[1:]).mkdir()
    for place in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if Path(place).is_symlink():
            with suppress(FileNotFoundError):
                (tree / place[1:]).rmdir()
            (tree / place[1:]).symlink_to(os.readlink(place))
        elif Path(place).is_dir():
            (tree / place[1:]).mkdir(exist_ok=True)
    alternatives = tree / "etc" / "alternatives"  # Debian's links from a program's name to the one that is installed
    alternatives.mkdir()
    for link in filter(Path.is_symlink, Path("/etc/alternatives").glob("*")):
        (alternatives / link.name).symlink_to(os.readlink(link))
    (tree / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n")
    (tree / "etc" / "group").write_text("root:x:0:\nnogroup:x:65534:\n")
    (tree / "etc" / "hosts").write_text("127.0.0.1 localhost workspace\n")


def _lay_places(tree: Path) -> None:
    """Folders that every file system has. What a hostile image has in their place is taken away."""
    for place in _PLACES:
        path = tree / place
        if path.is_symlink() and place not in _MOUNTED:
            continue
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            path.mkdir()
    (tree / "tmp").chmod(0o1777)


@contextmanager
def _laid_out(name: str) -> Iterator[Path | None]:
    """A folder to lay a tree out in, which becomes that of a name at the end; None: it is there."""
    store = image_store()
    if (store / name).exists():
        yield None
        return
    tree = Path(tempfile.mkdtemp(prefix=".begun-", dir=store))
    try:
        tree.chmod(0o755)
        yield tree
        _give(tree)
        for path in tree.rglob("*"):
            _give(path)
        with suppress(OSError):  # another process was quicker
            tree.rename(store / name)
    except (OSError, UnicodeError) as error:  # a name that is too long, a file where a folder must be
        raise ConfigError(f"a workspace cannot be laid out: {error}") from None
    finally:
        _remove(tree)


def _remove(tree: Path) -> None:
    if tree.exists():
        shutil.rmtree(tree, ignore_errors=True)


# archives and layouts


def image_of_archive(file: Path) -> Image:
    """Image of a tar archive, the whole file system. Errors: ConfigError."""
    if not file.is_file():
        raise ConfigError(f"the workspace {str(file)!r} is no file")
    name = hashlib.sha256(f"archive {_FORM}".encode() + _digest_of(file)).hexdigest()[:32]
    with _laid_out(name) as tree:
        if tree is not None:
            with _opened(file) as archive:
                _extract(archive, tree, file.name)
            _lay_places(tree)
    return Image(name, "/", uses_host_programs=False)


def image_of_layout(folder: Path) -> Image:
    """Image of an OCI layout: its one manifest's layers, one over the other. Errors: ConfigError.

    Source: the image layout and layer specifications of the Open Container Initiative, 1.1."""
    index = _json(folder / "index.json")
    manifest = _manifest(folder, index)
    name = hashlib.sha256(f"layout {_FORM} {json.dumps(manifest, sort_keys=True)}".encode()).hexdigest()[:32]
    with _laid_out(name) as tree:
        if tree is not None:
            for layer in manifest["layers"]:
                blob = _checked(folder, layer)
                with _opened(blob) as archive:
                    _extract(archive, tree, layer["digest"][:19])
            _lay_places(tree)
    config = _json(_checked(folder, manifest["config"])).get("config") or {}
    variables = config.get("Env") or [] if isinstance(config, dict) else None
    if not isinstance(variables, list) or not all(isinstance(each, str) and "\0" not in each for each in variables):
        raise ConfigError(f"the OCI layout {str(folder)!r} has variables that are no text")
    environment = {name: value for name, _, value in (each.partition("=") for each in variables) if name}
    return Image(name, check_folder(config.get("WorkingDir") or "/"), uses_host_programs=False, environment=environment)


def with_real_folder(image: Image) -> Image:
    """Image whose folder is none by a link, in its own tree. Errors: ConfigError for one that is not there."""
    tree = image_store() / image.digest
    place = tree
    try:
        for part in PurePosixPath(image.folder).parts[1:]:
            place = place / part
            if place.is_symlink():
                place = _inside(tree, place)
        if not place.is_dir():
            raise tarfile.TarError("it is not there")
    except (tarfile.TarError, OSError) as error:
        raise ConfigError(
            f"the workspace's folder {image.folder!r}: {error}; give another in the column 'folder'"
        ) from None
    return replace(image, folder=check_folder(f"/{place.relative_to(tree)}" if place != tree else "/"))


def check_folder(folder: object) -> str:
    """A folder of an image. Errors: ConfigError for what is no plain path: it becomes part of a mount's options."""
    pure = PurePosixPath(str(folder))
    if not pure.is_absolute() or ".." in pure.parts or set(str(folder)) & set(":,\\\0\n"):
        raise ConfigError(f"the image's folder {str(folder)!r:.100} is none that a workspace can have")
    return f"/{'/'.join(pure.parts[1:])}"


def _manifest(folder: Path, index: dict[str, Any], depth: int = 0) -> dict[str, Any]:
    """Errors: ConfigError for a layout of several images."""
    try:
        manifests = index["manifests"]
        machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
        fitting = [each for each in manifests if each.get("platform", {}).get("architecture", machine) == machine]
        [descriptor] = fitting
        found = _json(_checked(folder, descriptor))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError(f"the OCI layout {str(folder)!r} has not one image for this machine") from None
    if "manifests" in found and depth < 3:
        return _manifest(folder, found, depth + 1)
    if not isinstance(found.get("layers"), list) or "config" not in found:
        raise ConfigError(f"the OCI layout {str(folder)!r} has a manifest without layers or configuration")
    return found


def _blob(folder: Path, descriptor: dict[str, Any]) -> Path:
    """Errors: ConfigError."""
    try:
        kind, _, digest = descriptor["digest"].partition(":")
        if kind != "sha256" or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise ValueError
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ConfigError(f"the OCI layout {str(folder)!r} names a blob without a sha256 digest") from None
    return folder / "blobs" / "sha256" / digest


def _checked(folder: Path, descriptor: dict[str, Any]) -> Path:
    """Blob that is what its digest says. Errors: ConfigError."""
    blob, digest = _blob(folder, descriptor), descriptor["digest"]
    if not blob.is_file():
        raise ConfigError(f"the OCI layout lacks {digest}: fetch the image again")
    if f"sha256:{_digest_of(blob).hex()}" != digest:
        raise ConfigError(f"{blob} is not what its digest says: fetch the image again")
    return blob


def _json(file: Path) -> dict[str, Any]:
    """Errors: ConfigError."""
    try:
        value = read_json(file, _MOST_BYTES)
        if not isinstance(value, dict):
            raise ValueError("no object")
    except (OSError, ValueError, RefusedFile) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    return value


def _extract(archive: IO[bytes], tree: Path, name: str) -> None:
    """One layer over what is there. Errors: ConfigError for what leaves the tree."""
    magic = archive.read(4)
    archive.seek(0)
    try:
        with (
            _without_zstd(archive) if magic == _ZSTD else nullcontext(archive) as source,
            tarfile.open(fileobj=source, mode="r|gz" if magic[:2] == b"\x1f\x8b" else "r|") as members,
        ):
            for member in members:
                _extract_member(members, member, tree)
    except ConfigError:
        raise
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:  # of Arrow: ValueError
        raise ConfigError(f"{name} cannot be unpacked: {error}") from None


def _without_zstd(archive: IO[bytes]) -> Any:
    """Stream of what is compressed."""
    import pyarrow as pa

    return pa.CompressedInputStream(pa.PythonFile(archive, mode="r"), "zstd")


def _extract_member(members: tarfile.TarFile, member: tarfile.TarInfo, tree: Path) -> None:
    path = PurePosixPath(member.name)
    parts = [part for part in path.parts if part not in ("/", ".")]
    if ".." in parts or "\0" in member.name + member.linkname:
        raise tarfile.TarError(f"{member.name!r} is outside of it")
    if not parts or not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        return  # devices and pipes: the workspace has its own
    _check_depth(len(parts), repr(member.name)[:100])
    parent = _parent(tree, parts[:-1])
    if parts[-1] == _OPAQUE:
        for each in parent.iterdir():
            _delete(each)
        return
    if parts[-1].startswith(_WHITEOUT):
        if (deleted := parts[-1].removeprefix(_WHITEOUT)) in ("", ".", ".."):
            raise tarfile.TarError(f"{member.name!r} deletes nothing that a layer may")
        _delete(parent / deleted)
        return
    place = parent / parts[-1]
    if member.isdir():
        if place.is_symlink() or not place.is_dir():
            _delete(place)
            place.mkdir()
        place.chmod(member.mode & 0o777 | 0o700)
        return
    _delete(place)
    if member.issym():
        place.symlink_to(member.linkname)
    elif member.islnk():
        linked = [part for part in PurePosixPath(member.linkname).parts if part not in ("/", ".")]
        if ".." in linked or not linked:
            raise tarfile.TarError(f"{member.name!r} links outside of it")
        os.link(_parent(tree, linked[:-1]) / linked[-1], place, follow_symlinks=False)
    else:
        source = members.extractfile(member)
        assert source is not None, "it is a file"
        with place.open("xb") as file:
            shutil.copyfileobj(source, file)
        place.chmod(member.mode & 0o777 | 0o600)


def _parent(tree: Path, parts: list[str]) -> Path:
    """Folder of a member, made where it is missing. A link on the way is followed inside of the tree alone."""
    place = tree
    for part in parts:
        place = place / part
        if place.is_symlink():
            place = _inside(tree, place)
        if not place.is_dir():
            if place.exists():
                raise tarfile.TarError(f"{place.relative_to(tree)} is no folder")
            place.mkdir()
    return place


def _inside(tree: Path, link: Path) -> Path:
    """What a link to a folder means where the tree is the whole file system. Errors: TarError."""
    for _ in range(_MOST_LINKS):
        target = PurePosixPath(os.readlink(link))
        base = tree if target.is_absolute() else link.parent
        resolved = os.path.normpath(base / str(target).lstrip("/") if target.is_absolute() else base / target)
        if resolved != str(tree) and not resolved.startswith(f"{tree}{os.sep}"):
            break
        link = Path(resolved)
        if any(above.is_symlink() for above in link.parents if above != tree and above.is_relative_to(tree)):
            break
        if not link.is_symlink():
            return link
    raise tarfile.TarError(f"the link {link.name!r} leads outside of it, or over another link")


_MOST_LINKS = 8


def _delete(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)
