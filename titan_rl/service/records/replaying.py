"""Training requests of a service done again, on a trainer of its own, and compared with what was answered.

Nothing of the service's directory is written to. On the same kind of processor every answer is the same, to the bit.
"""

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from titan_rl.actors.classes import SERVICE_ACTORS
from titan_rl.config.command_line import EXIT_FAULT, EXIT_OK
from titan_rl.config.io.printable import say
from titan_rl.config.load import ConfigError
from titan_rl.controller.initial_policy import base_model
from titan_rl.controller.planning.device_report import fit_and_place
from titan_rl.controller.preflight.checks import Checked, resolve
from titan_rl.controller.preflight.recorded_config import load_recorded
from titan_rl.controller.wiring import make_meshes
from titan_rl.mesh.meshes import ProcessPlacement
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.service.adapters.training import AdapterTraining, RequestFailed
from titan_rl.service.records.journal import Entry, body_path, digest, read_body, read_journal
from titan_rl.service.training_requests import TrainingRequests


def replay_requests(root: Path, first: int, last: int, folders: Sequence[str], *, as_json: bool) -> int:
    """Repeat requests up to ``last``, and compare those from ``first`` on; the exit code. Errors: ConfigError.

    ``folders``: of code of one's own."""
    entries = list(read_journal(root))
    if not 1 <= first <= last <= len(entries):
        raise ConfigError(f"{root} has requests 1 to {len(entries)}: give --from and --to among them")
    run_dir = RunDir(root)
    checked, plan, _ = fit_and_place(resolve(load_recorded(run_dir, run_dir.config, folders)), under_torchrun=False)
    devices = None if plan is None else plan.devices
    different = asyncio.run(_replayed(run_dir, checked, devices, entries[:last], first))
    counts = Counter(entry.kind for entry in entries[first - 1 : last])
    if as_json:
        print(json.dumps({"requests": dict(counts), "different": different}))
    else:
        for number in different:
            entry = entries[number - 1]
            say(f"request {number}: {entry.kind} {entry.number} of {entry.model} is answered otherwise")
        say(f"{sum(counts.values())} requests compared, {len(different)} of them answered otherwise")
    return EXIT_FAULT if different else EXIT_OK


async def _replayed(run_dir: RunDir, checked: Checked, devices: object, entries: list[Entry], first: int) -> list[int]:
    """Numbers of the requests that are answered otherwise."""
    config = replace(checked.config, recovery=replace(checked.config.recovery, snapshot_every=0))
    with tempfile.TemporaryDirectory(prefix="titan_rl_replay_") as folder:
        meshes = make_meshes(
            *(config, checked.titan, base_model(config, run_dir)),
            actors=SERVICE_ACTORS,
            family=checked.family,
            parts=frozenset({"trainer"}),
            logs=Path(folder),
            placement=ProcessPlacement(launcher=checked.launcher, devices=devices),  # type: ignore[arg-type]
        )
        training = AdapterTraining(meshes, config, checked.titan.layout, Path(folder))
        requests = TrainingRequests(training, config.run.seed)
        try:
            await meshes.start()
            different = []
            for number, entry in enumerate(entries, 1):
                body = read_body(run_dir.root, entry)
                state = body_path(run_dir.root, "state", entry.model, entry.number)
                work = requests.again(entry.kind, entry.model, body, state)
                try:
                    answer = digest((await work()).body)
                except RequestFailed:
                    answer = ""
                if number >= first and answer != entry.answer:
                    different.append(number)
            return different
        finally:
            await meshes.stop()
