"""File systems of a workspace: layers, one over the other, with programs of the host.

A workspace's folder, /w/7, has:

    0       file system in memory, of a size: what was written, and overlay's own folder
    1       the same, of what was written since the first fork; 0 is a lower layer from then on
    root    all layers as one, with programs and devices on top: what commands see as /
"""

import os
import stat

import kernel

_RDONLY, _NOSUID, _NODEV, _BIND, _RECURSIVE, _PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
_NEW_MOUNTS, _DETACH = 0x00020000, 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
EMPTY = "/empty"
"""Folder with nothing in it: the kernel makes no overlay of one layer that is not written to."""
_MOST_LAYERS = 64
"""Below an upper one: their paths have to fit into a page."""


class TooManyLayers(RuntimeError):
    """A workspace was forked from too many generations of others."""


def have_own_mounts(namespace: int | None) -> None:
    """Enter a copy of a namespace of mounts, by its descriptor, or of this process's own."""
    if namespace is not None:
        kernel.call("setns", namespace, _NEW_MOUNTS)
    kernel.call("unshare", _NEW_MOUNTS)
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)


def mount_processes(place: str) -> None:
    """Mount what shows this namespace's processes."""
    _mount("proc", place, "proc", _NOSUID | _NODEV)


class Layers:
    """Owner of a workspace's layers."""

    def __init__(self, folder: str, lower: list[str], programs: list[str], size: int, files: int):
        """``lower``: from the latest to the image. ``programs``: the host's folders at the top that are shown."""
        self.folder, self.lower, self.programs = folder, lower, programs
        self._bounds = f"size={size},nr_inodes={files},mode=755"
        self.root, self._number = f"{folder}/root", 0
        for each in (folder, self.root):
            os.mkdir(each, 0o700)
        self._begin()

    def _begin(self) -> None:
        """A file system for each layer: none can be so full that there is no room for the next one."""
        if len(self.lower) > _MOST_LAYERS:
            raise TooManyLayers(f"there are {_MOST_LAYERS} forks between this workspace and its image")
        self.upper = self._lay(self.root, self.lower, str(self._number))
        for place in self.programs:  # each an overlay, so that no two workspaces meet at a file's locks
            os.makedirs(f"{self.root}{place}", exist_ok=True)
            _mount("overlay", f"{self.root}{place}", "overlay", _NOSUID | _NODEV | _RDONLY, f"lowerdir={place}:{EMPTY}")
        _mount("/dev", f"{self.root}/dev", None, _BIND | _RECURSIVE)

    def freeze(self) -> list[str]:
        """Go on in a new upper layer; all that are below it."""
        if os.listdir(self.upper):
            leave(self.folder)
            self.lower, self._number = [self.upper, *self.lower], self._number + 1
            self._begin()
        return self.lower

    def end(self) -> list[str]:
        """All layers, of which none is written to any more. It takes no space, of which none may be left."""
        leave(self.folder)
        return [self.upper, *self.lower]

    def show_folder(self, place: str, layers: list[str]) -> None:
        """Have a folder as it is in other layers, from the latest on, in the place of this workspace's own."""
        self._lay(f"{self.root}{place}", _folder_in(layers, place) or [EMPTY], "folder")

    def _lay(self, place: str, lower: list[str], name: str) -> str:
        """Mount layers at a place, below a new one, which is returned."""
        own = f"{self.folder}/{name}"
        os.mkdir(own)
        _mount("tmpfs", own, "tmpfs", _NOSUID | _NODEV, self._bounds)
        upper, work = f"{own}/upper", f"{own}/work"
        for each in (upper, work):
            os.mkdir(each)
        options = f"lowerdir={':'.join(lower)},upperdir={upper},workdir={work},userxattr"
        _mount("overlay", place, "overlay", _NOSUID | _NODEV, options)
        return upper


def _folder_in(layers: list[str], place: str) -> list[str]:
    """What makes up a folder of layers. They are hostile: no link of theirs is followed."""
    found, parts = [], place.strip("/").split("/")
    for layer in layers:
        path, hides = layer, False
        for depth, part in enumerate(parts, 1):
            path = f"{path}/{part}"
            try:
                is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
            except FileNotFoundError:
                break
            if not is_folder:
                return found  # it was deleted, or is something else now
            hides = hides or _is_opaque(path)
            if depth == len(parts):
                found.append(path)
        if hides:
            return found
    return found


def _is_opaque(path: str) -> bool:
    """Whether a folder of a layer hides those below it."""
    try:
        return os.getxattr(path, "user.overlay.opaque") == b"y"
    except OSError:
        return False


def leave(folder: str) -> None:
    """Unmount what a workspace's commands see."""
    kernel.call("umount2", f"{folder}/root".encode(), _DETACH)


def enter(root: str) -> None:
    """Make a folder the only file system that this process sees."""
    _mount(root, root, None, _BIND | _RECURSIVE)  # the kernel holds fast what a namespace was made with
    os.chdir(root)
    kernel.call("syscall", _PIVOT_ROOT, b".", b".")
    kernel.call("umount2", b".", _DETACH)
    os.chdir("/")


def _mount(source: str | None, place: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [text and text.encode() for text in (source, place, kind)]
    try:
        kernel.call("mount", *texts, flags, options and options.encode())
    except OSError as error:
        raise OSError(error.errno, f"{kind or 'bind'} at {place}: {os.strerror(error.errno or 0)}") from None
