"""Commands, without any actor started: what they list, what they say to a mistake, and how they are started."""

import asyncio
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import fields, is_dataclass

import pytest
import running
from tree import CONFIGS

from titan_rl import __version__, cli, train
from titan_rl.algorithms.registry import ALGORITHMS
from titan_rl.cli import main
from titan_rl.config import command_line
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import OUR_SECTIONS, TITAN_SECTIONS, Config
from titan_rl.config.sections.suites import PRESETS
from titan_rl.config.shipped import shipped
from titan_rl.controller import wiring
from titan_rl.controller.preflight.checks import resolve
from titan_rl.controller.session import one_line
from titan_rl.diagnostics.bench.harness import BENCHES, machine, row, run_bench
from titan_rl.diagnostics.bench.learning import off_policy
from titan_rl.diagnostics.bench.learning import smollm2 as learning_smollm2
from titan_rl.diagnostics.bench.learning import tomls as learning
from titan_rl.diagnostics.bench.planning.growth import off_the_line
from titan_rl.environments.scoring import scorer
from titan_rl.mesh.resources.open_files import raise_open_files
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.records.statistics import Proportion


def test_tasks_are_listed_without_those_that_cannot_be_had(capsys):
    assert main(["tasks"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    [*ours, first] = listed[: listed.index("ab") + 1]
    others = ["openenv", "nemo_gym", "verifiers", "gymnasium"]
    own = ["calculator", "treasure", "alphabet_sort", "reverse_text", "wordle", "shapes"]
    assert ours == ["jsonl", "code", "math", "search", "swe", *PRESETS, "mixture", *others, *own] and first == "ab"
    assert listed[len(ours) :] == sorted(listed[len(ours) :])
    assert {"gcd", "countdown"} <= set(listed) and "composite" not in listed


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["train", "nowhere.toml"], "nowhere.toml"),
        (["eval", "nowhere", "--task", "gcd"], "config.json"),
        (["eval", "tiny"], "directory"),
        (["eval", "tiny", "--suite", "gsm8k"], "directory"),
        (["eval", "tiny", "--k", "8"], "--suite NAME"),
        (["eval", "tiny", "--suite", "gsm8k", "--out", os.path.dirname(__file__)], "not empty"),
        (
            ["eval", "tiny", "--suite", "gsm8k", "--file", "b.toml"],
            "--file b.toml: this is for rows of a --suite; a TOML",
        ),
        (["eval", "tiny", "--file", "rows.jsonl"], "rows of a --suite"),
        (["eval", "tiny", "--suite", "gsm8k", "--file", ""], "--file has no name"),
        (["eval", "tiny", *("--suite", "gsm8k") * 2, "--file", "rows.jsonl"], "[[eval.suites]]"),
        (["eval", "tiny", "--config", "nowhere.toml"], "nowhere.toml"),
        (["eval", "tiny", "--suite", "gsm8k", "--task", "gcd"], "--task gcd"),
        *(
            (["eval", "tiny", "--suite", "gsm8k", f"--{key}={value}"], f"--{key}: an evaluation on suites does not rea")
            for key, value in (
                *(("rollout.temperature", 0.7), ("rollout.top_p", 0.5), ("task.reward", "gsm8k"), ("task.name", "gcd")),
                *(("hosts.launcher", "attach"), ("algorithm.name", "dapo")),
                *(("eval.every", 7), ("generator.kv", "recompute"), ("training.steps", 3), ("metrics.wandb", "true")),
            )
        ),
        (
            ["eval", "tiny", "--suite", "gsm8k", "--rollout.temperature=0.7"],
            "own temperature is set in [[",
        ),
        (["eval", "tiny", "--suite", "gsm8k", "--rollout.stop=['a']", "--task.style=chat"], "chat model"),
        (["eval", "tiny", "--suite", "gsm8k", "--rollout.stop=['a']", "--verifier.procs=2"], "directory"),
        (["bench", "stp"], "'step'"),
        (["bench"], "name"),
        (["model", "tiny", "somewhere", "--run.sed", "1"], "'seed'"),
        (["model", "smolm", "somewhere"], "'smollm2'"),
        (["model", "tiny", __file__], "new directory"),
        (["model", "tiny", f"{__file__}/model"], "new directory"),
        (["model", "tiny", os.path.dirname(__file__)], "not empty"),
        (["train", "x.toml", "--bad"], "--section.key"),
        (["train", "x.toml", "--=3"], "--section.key"),
        (["train", "x.toml", "--res"], "'--res'"),
        (["train", "x.toml", "another"], "'another'"),
        (["train", "x.toml", "--resume=3"], "--resume"),
        (["train", "two\nlines"], "two lines"),
        (["train", "a" * 5000], "quickstart"),
        (["trian", "x.toml"], "'train'"),
        (["--run.seed", "3", "trian", "x.toml"], "'train'"),
        (["ledger"], "run"),
        (["ledger", "nowhere"], "nowhere"),
        (["ledger", "nowhere", "--run.seed=3"], "--run"),
        (["replay", "nowhere"], "--from, --to"),
        (["replay", "nowhere", "--from", "1", "--to", "x"], "--to"),
        (["replay", "nowhere", "--from", "1", "--to", "2"], "nowhere"),
        (["scale", "nowhere", "--generators", "2"], "nowhere"),
        (["scale", "nowhere", "--generators", "0"], "--generators 0"),
        (["chaos", "nowhere.toml"], "nowhere.toml"),
        (["chaos", "chaos", "--kills", "0"], "--kills 1"),
        (["chaos", "chaos", "--targets", ""], "--targets"),
        (["tasks", "gcd"], "'gcd'"),
        (["tasks", "--run.seed", "3"], "--run"),
        (["train", "x.toml", "--config", "y.toml"], "x.toml and y.toml"),
        (["train", "--module", "llama3", "--config", "llama3_debugmodel"], "model.path"),
        (["train", "--module", "titan_rl"], "quickstart"),
        (["train", "--job.config_file=5"], "--job.config_file"),
        (["train", "--job.dump_folder=x"], "job.dump_folder"),
    ],
    ids=lambda value: " ".join(value)[-60:] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, word, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("titan-rl: ") and word in captured.err and not captured.out
    assert captured.err.count("\n") == 1 and captured.err.endswith("\n") and len(captured.err) < 1200


@pytest.mark.parametrize(("door", "arguments"), [(main, []), (main, ["train"]), (train.main, [])])
def test_without_arguments_there_is_help_and_no_run(door, arguments, capsys):
    assert door(arguments) == 2
    captured = capsys.readouterr()
    assert "usage: " in captured.err and not captured.out


@pytest.mark.parametrize("is_of_run", [False, True])
def test_an_evaluation_of_nothing_says_what_to_give(tmp_path, capsys, monkeypatch, is_of_run):
    """It once asked the default task, and printed 0.0 %."""
    monkeypatch.setattr("titan_rl.train.evaluate_directory", lambda *arguments: pytest.fail("it was asked something"))
    make_tiny(tmp_path / "model", seed=1)
    if is_of_run:
        sections = dict.fromkeys(("run", "training", "algorithm", "checkpoint"), {})
        (tmp_path / "config.json").write_text(json.dumps(sections | {"task": {"name": "countdown"}}))
    assert main(["eval", str(tmp_path / "model")]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in ("--suite NAME", "--config", "--task NAME")) and said.count("\n") == 1
    assert ("task.name = 'countdown'" in said) == is_of_run


@pytest.mark.parametrize("arguments", [["--task", "gcd"], ["--task.name=gcd"], ["--config", "quickstart"]])
def test_an_evaluation_of_something_goes_on(tmp_path, capsys, monkeypatch, arguments):
    monkeypatch.setattr("titan_rl.train.evaluate_directory", lambda *arguments: Proportion(1, 2))
    make_tiny(tmp_path / "model", seed=1)
    assert main(["eval", str(tmp_path / "model"), *arguments]) == 0


def test_the_help_of_train_lists_the_files_that_come_along_and_says_where_overrides_are_told(capsys):
    with pytest.raises(SystemExit) as done:
        main(["train", "--help"])
    said = capsys.readouterr().out
    assert done.value.code == 0 and "--section.key" in said and "docs/operations/configuration.md" in said
    assert len(shipped()) >= 3 and all(f"  {name}  " in said for name in shipped())
    assert all(name in said for name in (*OUR_SECTIONS, *TITAN_SECTIONS)) and "--run.seed" not in said


@pytest.mark.parametrize("arguments", [["quickstart", "--help"], ["--help", "quickstart"], ["-h", "my.toml"]])
def test_help_beside_a_file_is_the_help(arguments, capsys):
    with pytest.raises(SystemExit) as done:
        main(["train", *arguments])
    assert done.value.code == 0 and "usage: titan-rl train" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["task", "[task]", "task.judge"])
def test_the_help_of_a_section_lists_its_keys_and_those_of_what_is_chosen_in_it(name, capsys):
    with pytest.raises(SystemExit) as done:
        main(["train", "--help", name])
    said = capsys.readouterr().out
    assert done.value.code == 0 and said.startswith("[task]\n  --task.name  ('gcd')\n")
    assert "  --task.judge.url  (needed)" in said and "--run.seed" not in said and "usage" not in said


def test_the_help_of_no_section_says_what_was_meant(capsys):
    assert main(["train", "--help", "rollouts"]) == 2
    assert "--help rollouts: a TOML has no section of that name; did you mean 'rollout'?" in capsys.readouterr().err


def test_the_help_of_all_sections_lists_every_key_with_its_default_and_a_line(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help", "all"])
    said = capsys.readouterr().out
    for section in fields(Config):
        if section.name != "titan":
            keys = [f for f in fields(section.default_factory) if not f.name.startswith("_")]
            tables = [key.name for key in keys if is_dataclass(key.default_factory)]
            assert all(f"\n  --{section.name}.{key.name}  (" in said for key in keys if key.name not in tables)
            assert all(f"\n[{section.name}.{key}]\n  --{section.name}.{key}." in said for key in tables)
    assert "\n[model.chat_template]\n  --model.chat_template.file  ('')\n" in said
    assert "\n[task.options] with task.name = gsm8k\n  --task.options.file  (needed)\n" in said
    assert "\n  --run.seed  (1)\n      All randomness derives from it, by name.\n" in said
    assert "\n  --training.steps  (100)\n" in said and "\n  --optimizer.lr  (1e-05)\n" in said
    assert "\n  --parallelism.tensor_parallel_degree  (1)\n      " in said
    assert "--parallelism.enable_fsdp_symm_mem" not in said, "it is refused"
    assert (
        all(f"\n  {name}: " in said for name in ALGORITHMS) and "\n  --algorithm.clip_high\n      The ratio is" in said
    )
    assert "\n  grpo: clip_low (0.2), " in said and "\n  dpo: loss ('sigmoid'), beta (0.1)" in said
    assert "\n[task.judge]\n  --task.judge.url  (needed)\n" in said
    assert "\n[task.options] with task.name = jsonl, math\n  --task.options.file  (needed)\n" in said


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0 and capsys.readouterr().out == f"titan-rl {__version__}\n"


@pytest.mark.parametrize("door", [lambda arguments: main(["train", *arguments]), train.main], ids=["cli", "train"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["quickstart"],
        ["quickstart.toml"],
        ["--config", "quickstart"],
        ["--module", "titan_rl", "--config", "quickstart"],
        ["--module=titan_rl", "--config=quickstart.toml"],
        ["--job.config_file", "quickstart"],
        ["--job.config_file=quickstart.toml"],
    ],
)
def test_ways_to_name_the_file_of_a_run(door, arguments, tmp_path, monkeypatch):
    (tmp_path / "quickstart.toml").write_text("[run]\nseed = 5")
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(train, "train", lambda *given: asked.append(given) or 0)
    assert door(["--training.steps", "3", *arguments, "--resume"]) == 0
    assert asked == [(arguments[-1].rpartition("=")[2], {"training": {"steps": 3}}, True)]


@pytest.mark.parametrize(
    ("environment", "starter"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "torchrun"),
        ({"WORLD_SIZE": "2"}, "torchrun"),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}, "srun"),
        ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0"}, "mpirun"),
    ],
)
def test_the_first_of_several_controllers_says_why_not(environment, starter, capsys, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for door in (lambda: main(["train", "nowhere.toml"]), lambda: train.main(["nowhere.toml"])):
        assert door() == 2
        [line] = capsys.readouterr().err.splitlines()
        assert starter in line and next(iter(environment)) in line


def test_the_others_say_nothing(capsys, monkeypatch):
    monkeypatch.setattr(command_line, "_OTHERS_WAIT_SECONDS", 0.0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as done:
        main(["train", "nowhere.toml"])
    assert done.value.code == 2 and capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "environment",
    [
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x"},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script, which is started once
        {"WORLD_SIZE": "", "RANK": ""},
    ],
)
def test_one_controller_is_welcome(environment):
    command_line.check_started_once(environment)


@pytest.mark.parametrize("asked", [["titan_rl.train", "--training.stepz", "3"], ["titan_rl.cli", "tasks"]])
def test_a_mistake_under_torchrun_is_one_line_and_starts_nothing(asked, tmp_path):
    """Rank 0 has spoken before torchrun, which ends all when one has ended, could end it; torchrun says why, too."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", *asked]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    [line] = [line for line in done.stderr.splitlines() if line.startswith("titan-rl: ")]
    assert done.returncode == 1 and f"traceback : {line}" in done.stderr and "exitcode  : 2" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture
def unread() -> int:
    """The end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("buffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", [["bench", "list"], ["tasks"]], ids=" ".join)
def test_a_reader_that_has_gone_is_no_fault(arguments, buffered, unread):
    """Also when Python flushes for the last time."""
    command = [sys.executable, "-m", "titan_rl.cli", *arguments]
    environment = os.environ | {"PYTHONUNBUFFERED": buffered}
    done = subprocess.run(command, stdout=unread, stderr=subprocess.PIPE, env=environment, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (141, "")


def test_another_broken_pipe_is_told(monkeypatch, unread):
    def breaks(options, overrides):
        os.write(unread, b"x")

    monkeypatch.setitem(cli._COMMANDS, "tasks", breaks)
    with open(os.devnull, "w") as read, pytest.raises(BrokenPipeError):
        monkeypatch.setattr(sys, "stdout", read)
        main(["tasks"])


def test_ctrl_c_before_a_run_is_up_is_one_line(monkeypatch, capsys):
    def interrupted(options, overrides):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli._COMMANDS, "tasks", interrupted)
    assert main(["tasks"]) == 130 and capsys.readouterr().err == "titan-rl: stopped\n"


def test_smollm2_is_not_fetched_over_something(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["model", "smollm2", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err


def test_a_model_that_cannot_be_fetched_leaves_no_folder(tmp_path, monkeypatch, capsys):
    def offline(folder):
        raise ConfigError("no network")

    monkeypatch.setattr("titan_rl.models.builtin.smollm2.fetch_smollm2", offline)
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new"):
        assert main(["model", "smollm2", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err == "titan-rl: no network\n"
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_tiny_model_is_written(tmp_path):
    from transformers import AutoModelForCausalLM

    assert main(["model", "tiny", str(tmp_path / "tiny")]) == 0
    assert 600_000 < AutoModelForCausalLM.from_pretrained(tmp_path / "tiny").num_parameters() < 2_000_000


def test_a_row_says_whether_its_bar_holds():
    assert row("step", 0.2, "s", 0.3)["met"] and not row("step", 0.4, "s", 0.3)["met"]
    assert row("ratio", 0.96, "", 0.95, at_most=False)["met"] and not row("ratio", 0.9, "", 0.95, at_most=False)["met"]
    assert "met" not in row("free", 1.0, "s")


def test_benches_are_known_and_the_machine_is_told():
    with pytest.raises(ConfigError, match="step"):
        run_bench("stp", {})
    assert set(BENCHES) >= {"step", "generate", "step-smollm2"} and machine()["cores"] >= 1


def test_the_benches_are_listed(capsys):
    assert main(["bench", "list"]) == 0
    assert capsys.readouterr().out.splitlines() == list(BENCHES)


def test_growth_is_measured_by_the_distance_from_a_line():
    assert off_the_line([1, 2, 4, 8], [3.0, 5.0, 9.0, 17.0]) == pytest.approx(0)
    assert off_the_line([1, 2, 4, 8], [1.0, 4.0, 16.0, 64.0]) > 0.5


def test_every_tiny_toml_is_measured_after_what_it_takes():
    configs = {path.stem for path in CONFIGS.rglob("*_tiny.toml")}
    names = [study.name for study in learning.STUDIES]
    assert set(names) == configs | {"quickstart"} and len(names) == len(set(names))
    assert all(names.index(study.of) < number for number, study in enumerate(learning.STUDIES) if study.of)


def test_what_failed_has_learned_nothing():
    study, nothing = learning.Study("grpo_tiny"), learning.Outcome(1.0)
    assert not learning.row_of(study, {"grpo_tiny": nothing})["met"]
    learned = learning.Outcome(1.0, Proportion(20, 100), Proportion(40, 100))
    assert learning.row_of(study, {"grpo_tiny": learned})["met"]
    student = learning.Study("student", learning._OF_TEACHER, 0.9, "teacher", "teacher")
    assert not learning.row_of(student, {"student": learned, "teacher": nothing})["met"]
    assert learning.row_of(student, {"student": learned, "teacher": learned})["value"] == 1


def test_old_samples_are_held_to_what_seeds_differ_by():
    def of(*values: float) -> list:
        return [learning.Outcome(1.0, None, Proportion(round(100 * value), 100)) for value in values]

    arms = {off_policy.ON_POLICY: of(0.6, 0.7, 0.8), off_policy.UNCORRECTED: of(0.1, 0.1, 0.1)}
    near, far = (off_policy.rows_of(arms | {off_policy.CORRECTED: of(*c)})[-1] for c in ([0.6] * 3, [0.4] * 3))
    assert near["met"] and not far["met"] and far["value"] == pytest.approx(0.3)
    broken = arms | {off_policy.CORRECTED: [*of(0.6, 0.6), learning.Outcome(1.0)]}
    assert not off_policy.rows_of(broken)[-2]["met"]


def test_a_real_model_is_held_to_its_control():
    learned = learning.Outcome(600.0, Proportion(10, 100), Proportion(60, 100))
    for by_form, is_met in ((Proportion(20, 100), True), (Proportion(50, 100), False), (None, False)):
        above, seconds = learning_smollm2.rows_of("names, full", learned, by_form)
        assert above["met"] == is_met and seconds["met"]
    assert not learning_smollm2.rows_of("names, full", learning.Outcome(1.0), Proportion(20, 100))[0]["met"]


def test_a_remote_traceback_becomes_one_line():
    error = RuntimeError("Actor call generator0.generate failed.\n Traceback\n  File ...\nValueError: no room\n\n")
    assert one_line(error) == "RuntimeError: Actor call generator0.generate failed. ValueError: no room"


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (dict(task__name="composite"), "'mixture'"),
        (dict(rollout__group_size=1), "rollout.group_size"),
        (dict(model__path="."), "config.json"),
        (dict(parallelism__tensor_parallel_degree=8), "num_attention_heads"),
        (dict(parallelism__context_parallel_degree=3), "context_parallel_degree"),
        (dict(mesh__transport="cuda_ipc"), "GPU"),
        (dict(mesh__transport="rdma_ibverbs"), "rdma_tcp"),
        (dict(generator__tensor_parallel=3), "num_attention_heads"),
        (dict(algorithm__name="grp"), "grpo"),
        (dict(algorithm__name="supervised"), "[sft]"),
    ],
)
def test_a_wrong_config_starts_nothing(settings, word, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.main(["--run.dir", "run", *running.overrides(**settings)]) == 2
    captured = capsys.readouterr()
    [line] = (captured.out + captured.err).strip().splitlines()
    assert word in line, line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("code", [0, 1, 130])
def test_a_door_does_what_is_due_at_exit_and_takes_nothing_apart(code):
    program = f"""
import atexit, sys
from titan_rl.config.command_line import in_process

class Held:
    def __del__(self):
        print("taken apart")

def main():
    atexit.register(print, "due")
    print("said", end=" ")
    return {code}

held = Held()
sys.exit(in_process(main))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "said due\n", "")


def test_a_door_that_raises_says_so():
    program = "import sys; from titan_rl.config.command_line import in_process; sys.exit(in_process(lambda: 1 / 0))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


def test_a_busy_machine_makes_no_traceback_of_monarchs_goodbye():
    """Its own, as Python ends, has a second; ours comes first, has ten, and needs no more."""
    program = """
import atexit, sys, types

class Goodbye:
    def get(self, timeout):
        print("patience", timeout)
        raise TimeoutError

asked = []

def shutdown_context(host_timeout):
    asked.append(host_timeout)
    return Goodbye() if len(asked) == 1 else types.SimpleNamespace(get=lambda timeout: None)

sys.modules["monarch.actor"] = types.SimpleNamespace(shutdown_context=shutdown_context)
atexit.register(lambda: shutdown_context(0.3).get(timeout=1.0))
from titan_rl.config.command_line import in_process
sys.exit(in_process(lambda: 3))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "patience 10.0\n", "")


@pytest.mark.parametrize("fails", [False, True])
def test_what_actors_print_is_kept_where_something_failed(monkeypatch, fails):
    """Of a command that has no run directory: not on the terminal, such as Monarch's word about each process."""
    made, said = [], []

    class FakeMeshes:
        async def start(self) -> None:
            (made[0] / "trainer_1.txt").write_text("(bootstrap) PDEATHSIG disabled via config")

        async def stop(self) -> None:
            pass

    def make(*arguments, logs, **options) -> FakeMeshes:
        made.append(logs)
        return FakeMeshes()

    monkeypatch.setattr(wiring, "make_meshes", make)
    monkeypatch.setattr(wiring, "this_machine", lambda: None)

    async def use() -> None:
        async with wiring.Actors(resolve(load_config(None)), "model", frozenset(), log=said.append):
            if fails:
                raise RuntimeError("step 3 came out otherwise")

    with pytest.raises(RuntimeError) if fails else nullcontext():
        asyncio.run(use())
    assert made[0].exists() == fails
    assert said == ([f"what the actors printed is in {made[0]}"] if fails else [])
    shutil.rmtree(made[0], ignore_errors=True)


def test_a_run_wants_the_main_thread_and_no_loop_around_it(tmp_path, capsys):
    """Which is said before anything is imported or forked for it."""
    command = ["train", "quickstart", "--run.dir", str(tmp_path / "run")]
    codes = []
    thread = threading.Thread(target=lambda: codes.append(main(command)))
    thread.start()
    thread.join()

    async def within_a_loop() -> None:
        codes.append(main(command))

    asyncio.run(within_a_loop())
    assert codes == [2, 2] and not (tmp_path / "run").exists()
    said = capsys.readouterr().err
    assert "signals reach the main thread alone" in said and "an event loop is running here already" in said


def test_too_few_open_files_are_one_line(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    with pytest.raises(
        ConfigError, match=r"^a process may have 64 open files here \(`ulimit -Hn`\), and needs 256: raise"
    ):
        raise_open_files.__wrapped__()


def test_a_scorer_asks_for_no_more_memory_than_it_may_have(monkeypatch):
    asked = {}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (3 << 30, 3 << 30))
    monkeypatch.setattr(resource, "setrlimit", asked.__setitem__)
    scorer._load(load_config(None, {}).task, [], [])
    assert asked[resource.RLIMIT_AS] == (3 << 30, 3 << 30)
