"""Paths of the controller that other hosts have elsewhere: in their scratch folders, where no file system is shared."""

from collections.abc import Mapping


class HostPath(str):
    """A path below the run directory or the model, as an argument of a remote call: only these are translated.

    Inside other arguments (a dataclass, a list) nothing is: what is named there is at the same place on all hosts.
    """

    __slots__ = ()

    def at(self, places: Mapping[str, str]) -> str:
        """The same folder on a host, as a plain string. ``places``: of the controller's paths, where they are."""
        for path, place in places.items():
            if self == path or self.startswith(f"{path}/"):
                return place + self[len(path) :]
        return str(self)


NOWHERE = HostPath()
"""For what is not to be written."""
