"""Report of a placement on GPUs (device_plan.py), as text and as JSON."""

from typing import Any

from titan_rl.controller.planning.device_plan import DevicePlan, machine_of, plan_devices
from titan_rl.controller.planning.memory_plan import GIB, Need, fit_into_memory
from titan_rl.controller.preflight.checks import Checked
from titan_rl.mesh.resources.devices import GENERATOR, HELPER, Seat


def fit_and_place(checked: Checked, *, under_torchrun: bool) -> tuple[Checked, DevicePlan | None, list[str]]:
    """Run that fits this machine, its placement (None: on a CPU), and lines for people.

    Errors: ConfigError for what cannot fit.
    """
    fitting, memory = (checked, []) if under_torchrun else fit_into_memory(checked)
    if (machine := machine_of(checked)) is None:
        return fitting, None, memory
    plan = plan_devices(fitting, machine)
    return fitting, plan, [*placement_lines(plan), *memory]


def placement_lines(plan: DevicePlan) -> list[str]:
    """Lines about processes and memory by GPU. Equal GPUs share a line."""
    machine = plan.machine
    first = f"placement on {machine.hosts} x {machine.devices_per_host} GPUs of {machine.memory / GIB:.1f} GiB"
    lends = "; the trainer lends its own to helper generators while it waits" if plan.table.seats.get(HELPER) else ""
    turns = lends or ("; trainer and generators take turns" if plan.in_turns else "")
    lines = [f"{first}, {plan.share:g} of which may be used{turns}:", *_lines(plan), *_host_lines(plan)]
    count, idle = machine.hosts * machine.devices_per_host, idle_devices(plan)
    mend = (
        "raise generator.replicas, or degrees of [parallelism]"
        if plan.table.seats.get(GENERATOR)
        else ("raise degrees of [parallelism]")
    )
    return [*lines, f"  {idle} of {count} GPUs idle: {mend}, to use them"] if idle else lines


def idle_devices(plan: DevicePlan) -> int:
    """GPUs of the machine on which no process of the run is."""
    return plan.machine.hosts * plan.machine.devices_per_host - len(plan.needs)


def _lines(plan: DevicePlan) -> list[str]:
    rows: list[tuple[list[Seat], list[list[Need]]]] = []
    for seat, needs in plan.needs.items():
        if rows and _alike(rows[-1], seat, needs):
            rows[-1][0].append(seat)
            rows[-1][1].append(needs)
        else:
            rows.append(([seat], [needs]))
    return [_line(plan, seats, needs) for seats, needs in rows]


def _alike(row: tuple[list[Seat], list[list[Need]]], seat: Seat, needs: list[Need]) -> bool:
    seats, others = row
    same = [need.bytes_by_reason for need in others[0]] == [need.bytes_by_reason for need in needs]
    roles = [need.process.split()[0] for need in others[0]] == [need.process.split()[0] for need in needs]
    return same and roles and seats[-1].host == seat.host


def _line(plan: DevicePlan, seats: list[Seat], needs: list[list[Need]]) -> str:
    first, last = seats[0], seats[-1]
    devices = f"GPU {first.device}" + (f" to {last.device}" if last != first else "")
    words = "; ".join(_range(*pair) for pair in zip(needs[0], needs[-1], strict=True))
    whole = plan.held(first) / GIB
    return f"  host {first.host} {devices}: {whole:.1f} GiB{' each' if last != first else ''}: {words}"


def _range(first: Need, last: Need) -> str:
    together = f"{first.process} to {last.process}"
    return str(first if first.process == last.process else Need(together, first.bytes_by_reason))


def _host_lines(plan: DevicePlan) -> list[str]:
    return [
        f"  host {host} memory: {'; '.join(map(_host_words, needs))}" for host, needs in plan.on_host.items() if needs
    ]


def _host_words(need: Need) -> str:
    return f"{need.process} {', '.join(f'{why} {size / GIB:.1f} GiB' for why, size in need.bytes_by_reason.items())}"


def as_json(plan: DevicePlan) -> dict[str, Any]:
    """Placement as JSON; sizes in bytes."""

    def entries(needs: list[Need]) -> list[dict[str, Any]]:
        return [{"name": need.process, "bytes": need.bytes_by_reason} for need in needs]

    return {
        "hosts": plan.machine.hosts,
        "devices_per_host": plan.machine.devices_per_host,
        "device_bytes": plan.machine.memory,
        "usable_share": plan.share,
        "kv_cache_bytes": plan.kv_cache,
        "idle_devices": idle_devices(plan),
        "devices": [
            {"host": s.host, "device": s.device, "bytes": plan.held(s), "processes": entries(needs)}
            for s, needs in plan.needs.items()
        ],
        "host_memory": [{"host": host, "processes": entries(needs)} for host, needs in plan.on_host.items()],
    }
