"""What a check is, and what comes of one."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from titan_rl.diagnostics.doctor.context import CheckContext

Status = Literal["passed", "wrong", "not finished", "not looked at"]
"""``not finished``: an actor ended while the check looked, which says nothing about what is checked."""


_AGAIN = "Nothing is known of this check: run the doctor again, where the machine is less busy if an actor hung"


@dataclass(frozen=True)
class Check:
    name: str
    about: str
    """What holds if it passes."""
    mend: str
    """What to do if it does not."""
    run: Callable[[CheckContext], Awaitable[str]]
    """Summary of what was measured. Errors: CheckFailed; CheckSkipped."""
    needs: frozenset[str] = frozenset()
    """Parts of the mesh (mesh.meshes.ALL_PARTS); none: it is looked at before any actor is started."""
    after: tuple[str, ...] = ()
    """Checks that must not have failed, since this one could not tell their bugs from its own."""


@dataclass(frozen=True)
class Finding:
    check: Check
    status: Status
    message: str
    """What was seen; what is wrong; why it did not end; or why nothing was looked at."""
    evidence: str = ""
    seconds: float = 0.0
    own_mend: str = ""
    """What to do about this one; empty: as the check says."""

    @property
    def mend(self) -> str:
        return (self.own_mend or self.check.mend) if self.status == "wrong" else ""

    def line(self) -> str:
        """Line for people."""
        if self.status == "wrong":
            return f"WRONG    {self.check.name}: {self.message}: {self.evidence}. {self.mend}"
        if self.status == "not finished":
            return f"BROKEN   {self.check.name}: {self.message}: {self.evidence}. {_AGAIN}"
        mark = "passed" if self.status == "passed" else "-"
        return f"{mark:<8} {self.check.name}: {self.message}"

    def as_json(self) -> dict[str, Any]:
        return {
            "check": self.check.name,
            "about": self.check.about,
            "status": self.status,
            "says": self.message,
            "evidence": self.evidence,
            "mend": self.mend,
            "seconds": round(self.seconds, 3),
        }
