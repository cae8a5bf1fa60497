"""How a run ends, and what it leaves: signals, events, and what is cleared away behind it. Nothing is trained here."""

import asyncio
import gc
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from titan_rl.config.command_line import TrainCommand
from titan_rl.config.load import ConfigError
from titan_rl.controller.console.end_summary import stopping
from titan_rl.controller.loop.shutdown import Shutdown, Stopped, StopRequest
from titan_rl.controller.recovery.recorded_rollouts import Recovery
from titan_rl.mesh.control.poison_prompts import EveryPromptFails
from titan_rl.mesh.hosts.hosts import Host
from titan_rl.mesh.processes.processes import ending, new_mark, running
from titan_rl.mesh.processes.reaper import reap
from titan_rl.mesh.resources import scratch
from titan_rl.mesh.supervision.actor_process import ActorDied, ActorFault, ActorProcess, ActorProcesses
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.train import run_to_end

SLEEP = "import time; time.sleep(60)"
SEMAPHORE = """
import multiprocessing, subprocess, sys, time
semaphore = multiprocessing.get_context("spawn").Semaphore()
print(semaphore._semlock.name, flush=True)
"""
HOLDER = """
from multiprocessing import resource_tracker
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
end = resource_tracker._resource_tracker._fd
print(subprocess.Popen(sleep, pass_fds=[end], env={}, stdout=subprocess.DEVNULL).pid, flush=True)
"""
WAIT = "time.sleep(60)"


def start(program: str, mark: dict[str, str] | None = None) -> subprocess.Popen:
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, env=os.environ | (mark or {}), stdout=subprocess.PIPE, text=True)


def end(*processes: subprocess.Popen) -> None:
    for process in processes:
        process.kill()
        process.wait()


def wait_until_running(mark: dict[str, str], count: int) -> None:
    """A process carries its mark only once it has become the program that it is to run."""
    deadline = time.monotonic() + 60
    while len(running(mark)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


# what is left behind


def test_the_reaper_ends_what_a_dead_controller_leaves_and_removes_its_folders(tmp_path):
    """A process that is stopped cannot end by itself. Another run's is not touched."""
    mark, others = new_mark(), new_mark()
    controller, stopped, other = start(SLEEP), start(SLEEP, mark), start(SLEEP, others)
    folder, another = tmp_path / "titan_rl_ours", tmp_path / "titan_rl_another"
    for path in (folder / "sockets", another):
        path.mkdir(parents=True)
    try:
        wait_until_running(mark, 1)
        stopped.send_signal(signal.SIGSTOP)
        end(controller)
        reap(controller.pid, mark, [folder, tmp_path / "gone already"])
        assert stopped.wait(60) == -signal.SIGKILL and not folder.exists()
        assert other.poll() is None and another.exists()
    finally:
        end(stopped, other)


def test_folders_stay_while_a_process_that_may_use_them_does(tmp_path):
    mark = new_mark()
    controller, left = start("pass"), start(SLEEP, mark)
    try:
        wait_until_running(mark, 1)
        controller.wait()
        reap(controller.pid, mark, [tmp_path], seconds=0)  # no time to end it
        assert left.poll() is None and tmp_path.exists()
    finally:
        end(left)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_semaphores_of_killed_processes_are_removed(is_stopped):
    """By the resource tracker of the process that made them, which is therefore not killed with it, but woken."""
    mark = new_mark()
    maker = start(SEMAPHORE + WAIT, mark)
    file = Path("/dev/shm") / f"sem.{maker.stdout.readline().strip().removeprefix('/')}"
    try:
        wait_until_running(mark, 2)  # its tracker, too
        assert file.exists()
        if is_stopped:
            os.kill(max(running(mark)), signal.SIGSTOP)
        for _ in ending(mark, 10):
            maker.poll()
            time.sleep(0.01)
        assert not file.exists() and not running(mark)
    finally:
        end(maker)


def test_a_tracker_that_does_not_end_is_killed_at_last():
    """Since somebody else, of no run, holds the pipe whose end it waits for."""
    mark = new_mark()
    maker = start(SEMAPHORE + HOLDER + WAIT, mark)
    file = Path("/dev/shm") / f"sem.{maker.stdout.readline().strip().removeprefix('/')}"
    holder = int(maker.stdout.readline())
    try:
        start_time = time.monotonic()
        for _ in ending(mark, 1.5):
            maker.poll()
            time.sleep(0.01)
        assert not running(mark) and time.monotonic() - start_time > 0.4
    finally:
        end(maker)
        os.kill(holder, signal.SIGKILL)
        file.unlink(missing_ok=True)


def test_scratch_is_removed_with_the_shared_memory_named_after_it(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "_SHARED_MEMORY", tmp_path)
    folder = scratch.make_scratch()
    (folder / "generator1").touch()
    for name in (f"{folder.name}-generator1-0", "titan_rl_another-generator1-0"):
        (tmp_path / name).touch()
    assert folder.stat().st_mode & 0o777 == 0o700
    scratch.remove_scratch(folder)
    assert not folder.exists()
    assert [file.name for file in tmp_path.iterdir()] == ["titan_rl_another-generator1-0"]


def test_a_temporary_folder_with_a_long_name_is_not_used_for_sockets(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + 60 * "x")
    assert scratch.temporary_folder() == "/tmp"
    monkeypatch.setattr("tempfile.tempdir", "/var/tmp")
    assert scratch.temporary_folder() == "/var/tmp"


# events


def make_processes(told: list[tuple[str, str]], tmp_path: Path) -> ActorProcesses:
    def tell(kind: str, **fields) -> None:
        told.append((kind, fields["name"]))

    return ActorProcesses(None, tmp_path, 0, launcher=None, record_event=tell)


def make_process(processes: ActorProcesses, name: str, sidecar=None) -> ActorProcess:
    died = asyncio.get_running_loop().create_future()
    host = Host("host 0", None, died=died, kinds=[name.split()[0]])
    process = ActorProcess(name, None, None, sidecar, host)
    process.deaths.register("record", processes._record_death)
    processes.all.append(process)
    return process


def test_a_process_that_is_being_started_has_no_id_to_be_known_by(tmp_path):
    """A signal to process 0 would be for the whole group of whoever sends it."""

    async def run() -> dict[int, str]:
        processes = make_processes([], tmp_path)
        for name, pid in (("generator 0", 7), ("generator 1", 0)):
            make_process(processes, name).pid = pid
        return processes.names()

    assert asyncio.run(run()) == {7: "generator 0"}


def test_a_sidecar_that_is_asked_while_its_process_dies_is_not_waited_for(tmp_path):
    async def run() -> None:
        process = make_process(make_processes([], tmp_path), "generator 0")
        request = SimpleNamespace(endpoint="keep", at=lambda sidecar, is_here: asyncio.Event().wait())
        asyncio.get_running_loop().call_soon(process.end)
        with pytest.raises(ActorDied, match="keep"):
            await asyncio.wait_for(process.ask_sidecar(request), 5)

    asyncio.run(run())


def test_who_ends_with_the_run_or_is_sent_away_did_not_die(tmp_path):
    async def run() -> list[tuple[str, str]]:
        told = []
        processes = make_processes(told, tmp_path)
        killed, dismissed, last = (make_process(processes, name) for name in ("trainer 0", "generator 1", "verifier 0"))
        killed.end()
        dismissed.is_stopping = True
        dismissed.end()
        processes.are_stopping = True
        last.end()
        return told

    assert asyncio.run(run()) == [("died", "trainer 0"), ("stopped", "generator 1"), ("stopped", "verifier 0")]


def test_who_is_gone_with_his_host_was_lost_with_it_whoever_is_heard_of_first(tmp_path):
    async def run() -> list[str]:
        processes = make_processes([], tmp_path)
        with_host, alone = (make_process(processes, name) for name in ("trainer 0", "trainer 1"))
        loop = subprocess.Popen(["true"])
        os.waitid(os.P_PID, loop.pid, os.WEXITED | os.WNOWAIT)
        with_host.host.pid, alone.host.pid = loop.pid, os.getpid()
        for process in (with_host, alone):
            process.end()
        loop.wait()
        return [with_host.why, alone.why]

    assert asyncio.run(run()) == ["lost host 0", "died"]


def test_a_start_that_is_cut_off_fails_in_silence(tmp_path):
    """As a standby's when the run ends: nobody waits for its first answer any more, which is an error then."""

    async def run() -> list[str]:
        complaints = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["message"]))
        processes = make_processes([], tmp_path)

        async def answer(*_):
            try:
                await asyncio.sleep(60)
            finally:
                raise RuntimeError("its process is gone")

        sidecar = SimpleNamespace(start=SimpleNamespace(call_one=answer))
        starting = asyncio.ensure_future(processes._start(make_process(processes, "trainer 0", sidecar), "trainer_1"))
        await asyncio.sleep(0.01)
        starting.cancel()
        await asyncio.wait({starting})
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if left:
            await asyncio.wait(left, timeout=1)
        assert starting.cancelled() and all(task.done() for task in left), "nothing of it goes on"
        del starting, left
        gc.collect()
        return complaints

    assert asyncio.run(run()) == []


# what is new when it ends


def rescued(timeout: float, error: BaseException, *, step: int = 3, is_between_steps: bool = True) -> list[str]:
    """What a run says that ends with 2 steps saved, where a checkpoint takes 0.2 s and may take ``timeout``."""
    said, trainer = [], SimpleNamespace()

    async def run() -> None:
        async def write() -> None:
            await asyncio.sleep(0.2)
            checkpointing.saved_step = step

        async def save() -> None:
            checkpointing.writing = asyncio.create_task(write())

        async def finish() -> None:
            if checkpointing.writing is not None:
                await checkpointing.writing

        async def call(request) -> None:
            said.append(request.endpoint)

        trainer.call = call
        checkpointing = SimpleNamespace(timeout=timeout, finish=finish, saved_step=2, writing=None)
        shutdown = Shutdown(
            *(RunDir(Path("run")), trainer, checkpointing, SimpleNamespace(weights_are_finite=True)),
            SimpleNamespace(step=step),
            save_last=save,
            log=said.append,
            export_dtype="auto",
        )
        await shutdown.rescue(error, is_between_steps=is_between_steps)

    asyncio.run(run())
    return said


def test_the_last_checkpoint_may_take_as_long_as_any_other_and_is_told_when_it_is_there():
    assert rescued(1800.0, Stopped()) == ["step 3 is saved", "save_hf"]
    assert rescued(1800.0, ActorFault("no generator is left")) == ["step 3 is saved"]
    assert rescued(0.01, Stopped()) == ["could not save step 3: writing the last checkpoint did not end within 0.01 s"]


@pytest.mark.parametrize("settings", [dict(step=0), dict(is_between_steps=False)])
def test_where_nothing_is_new_nothing_is_saved(settings):
    assert rescued(1800.0, Stopped(), **settings) == []


def test_a_stop_right_after_a_checkpoint_leaves_the_model_alone():
    assert rescued(1800.0, Stopped(), step=2) == ["save_hf"]
    assert rescued(1800.0, ActorFault("no generator is left"), step=2) == []


def test_a_drafter_of_an_earlier_end_is_named_beside_a_new_model(tmp_path):
    run_dir = RunDir(tmp_path)
    for folder in (tmp_path / "drafter", tmp_path / "critic"):
        folder.mkdir()
        (folder / "model.safetensors").touch()
        os.utime(folder / "model.safetensors", (1, 1))
    begun = time.time()
    (tmp_path / "critic" / "model.safetensors").write_bytes(b"it may be written before the model is")
    assert run_dir.stale_exports(begun) == [tmp_path / "drafter"]


def test_who_asks_to_stop_is_not_told_of_what_is_not_saved_yet():
    assert (
        "is saved;" in (line := stopping(RunDir(Path("run")), TrainCommand("a.toml"))) and "which is saved" not in line
    )


def test_recorded_steps_that_are_trained_again_end_between_two(monkeypatch):
    """In the middle of one the trainer would be a step ahead of what its checkpoint says."""
    trained, stop = [], StopRequest()

    async def train_again(trainer, step, recorded) -> None:
        trained.append(step)
        if step == 5:
            stop.ask()
        await asyncio.sleep(0)

    monkeypatch.setattr("titan_rl.controller.recovery.recorded_rollouts.last_recorded", lambda *_: 9)
    monkeypatch.setattr("titan_rl.controller.recovery.recorded_rollouts.read_metrics", lambda *_: [])
    recovery = object.__new__(Recovery)
    recovery.progress, recovery._train_again = SimpleNamespace(step=3), train_again
    recovery.run_dir = SimpleNamespace(rollouts=None, root=None)
    recovery.ledger = SimpleNamespace(last_trained_step=lambda: 9)
    with pytest.raises(Stopped):
        asyncio.run(recovery.train_recorded(None, stop.check))
    assert trained == [4, 5]


# exit codes


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (ValueError("a mistake"), 1),
        (ActorFault("the trainer was repaired 5 times"), 1),
        (EveryPromptFails("3 prompts in a row failed for the same reason: mine:reward: KeyError: 'x'"), 1),
        (Stopped("the disk is full"), 1),
        (Stopped(), 130),
        (asyncio.CancelledError(), 1),
        (ConfigError("parallelism: no host has so many GPUs"), 2),
    ],
)
def test_a_fault_is_never_exit_code_0(monkeypatch, capsys, error, code):
    """And one whose message does not name its cause has a traceback. The session is a stub, and so is the module that
    it comes from, whose imports take seconds."""
    closed = []

    async def start() -> None:
        pass

    async def run() -> None:
        if error is not None:
            raise error

    async def close(error, why) -> None:
        closed.append((error, why is None))

    session = SimpleNamespace(
        **dict(start=start, run=run, close=close, log=print, stop=print),
        **dict(stop_request=StopRequest(), run_dir=SimpleNamespace(logs="logs")),
    )
    monkeypatch.setitem(sys.modules, "titan_rl.controller.session", SimpleNamespace(one_line=str))
    for of_a_process_of_its_own in ("_stop_on_signals", "_ignore_signals", "relieve_collector"):
        monkeypatch.setattr(f"titan_rl.train.{of_a_process_of_its_own}", lambda *_: None)
    assert asyncio.run(run_to_end(session)) == code
    assert closed == [(error, error is None)]
    has_traceback = type(error) in (ValueError, ActorFault, asyncio.CancelledError)
    assert ("Traceback" in capsys.readouterr().out) == has_traceback


# signals

STUB = """
import asyncio, os, sys, time, types
from functools import partial
from pathlib import Path
sys.modules["titan_rl.controller.session"] = types.SimpleNamespace(one_line=str)  # its imports take seconds
from titan_rl.controller.console.display import Display
from titan_rl.controller.loop.shutdown import Stopped, StopRequest
from titan_rl.train import drive, run_to_end

class Stub:
    '''A session that waits to be stopped, has a step to end and much to say then, and saves for SAVING seconds.'''
    def __init__(self, folder):
        self.folder, self.stop_request = folder, StopRequest()
        self.display = Display(3, folder / "log.txt")
        self.log, self.stop = self.display.log, self.stop_request.ask
    async def start(self):
        self.display.__enter__()
        self.log("waits")
        (self.folder / "waits").touch()
    async def run(self):
        while not self.stop_request.is_requested:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        for _ in range(3):
            self.log("a step ends")
        raise Stopped
    async def close(self, error, why):
        self.log(why)
        (self.folder / "saves").touch()
        await self.stop_request.until_urgent(partial(asyncio.sleep, float(os.environ.get("SAVING", "0"))))
        (self.folder / "saved").write_text(why)
        self.display.__exit__()

folder = Path(sys.argv[1])
code = drive(run_to_end(Stub(folder)))
(folder / "ended").touch()
time.sleep(float(os.environ.get("LEAVING", "0")))
sys.exit(code)
"""


def wait_until_there(file: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)


@pytest.fixture
def start_stub():
    """Starts it as from a terminal, also where these tests run under nohup; none outlives its test."""
    started = []

    def start(folder: Path, *before: str, **options) -> subprocess.Popen:
        command = [*before, sys.executable, "-c", STUB, str(folder)]
        process = subprocess.Popen(command, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL), **options)
        started.append(process)
        wait_until_there(folder / "waits", process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(5)


def test_a_closed_terminal_ends_the_run_saved(start_stub, tmp_path):
    """The kernel sends SIGHUP, and from then on nothing can be written; the run's log has it."""
    ours, its = pty.openpty()
    process = start_stub(tmp_path, "setsid", "--ctty", stdin=its, stdout=its, stderr=its)
    os.close(its)
    os.close(ours)
    assert process.wait(60) == 130
    assert (tmp_path / "saved").read_text() == "stopped by the user"
    assert (tmp_path / "log.txt").read_text().splitlines() == ["waits", *3 * ["a step ends"], "stopped by the user"]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_saved(start_stub, tmp_path, number):
    """SIGHUP may come twice, from the kernel and from the shell."""
    process = start_stub(tmp_path, stdout=subprocess.DEVNULL)
    for _ in range(2 if number == signal.SIGHUP else 1):
        process.send_signal(number)
        time.sleep(0.1)
    assert process.wait(60) == 130 and (tmp_path / "saved").read_text() == "stopped by the user"


def test_a_second_ctrl_c_does_not_wait(start_stub, tmp_path):
    process = start_stub(tmp_path, stdout=subprocess.DEVNULL)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    assert process.wait(60) == 130 and (tmp_path / "saved").read_text() == "stopped by the user at once"


def test_a_second_ctrl_c_ends_the_saving(start_stub, tmp_path):
    """Later ones change nothing, nor does a terminal that is closed."""
    environment = os.environ | {"SAVING": "60", "LEAVING": "1"}
    process = start_stub(tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    process.send_signal(signal.SIGINT)
    wait_until_there(tmp_path / "saves", process)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
    wait_until_there(tmp_path / "ended", process)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
    _, complaints = process.communicate(timeout=30)
    assert process.returncode == 130 and (tmp_path / "saved").exists() and not complaints


def test_under_nohup_a_closed_terminal_is_nothing(start_stub, tmp_path):
    process = start_stub(tmp_path, "nohup", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.terminate()
    assert process.wait(60) == 130 and (tmp_path / "saved").exists()


def test_who_reads_the_output_may_go(start_stub, tmp_path):
    process = start_stub(tmp_path, stdout=subprocess.PIPE)
    process.stdout.close()
    process.terminate()
    assert process.wait(60) == 130 and (tmp_path / "saved").exists()
