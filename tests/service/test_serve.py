"""``titan-rl serve`` on real actors, asked by the official SDK: training, sampling, deaths, several clients."""

import asyncio
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import running
import tinker
from tinker import types
from waiting import eventually

from titan_rl.config.command_line import EXIT_FAULT, EXIT_OK, EXIT_USER
from titan_rl.service.records.journal import read_journal

pytestmark = pytest.mark.slow
_RANK, _STEPS, _MANY_STEPS = 8, 6, 50
_WORDS = [list(range(5, 17)), [20, 9, 41, 8, 33, 7], [60, 61, 62, 63, 64, 65, 66, 67, 68]]
_ADAM = types.AdamParams(learning_rate=3e-3)


@dataclass
class Served:
    base_url: str
    api_key: str
    base_model: str
    run: Path

    def client(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.base_url, api_key=self.api_key)

    def trainer(self, client: tinker.ServiceClient, seed: int) -> tinker.TrainingClient:
        return client.create_lora_training_client(base_model=self.base_model, rank=_RANK, seed=seed).result()

    def pid_of(self, kind: str) -> int:
        pids = json.loads((self.run / "pids.json").read_text())
        return next(int(pid) for pid, name in pids.items() if name.startswith(kind))


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("service")
    toml = folder / "serve.toml"
    toml.write_text(f"[lora]\nrank = {_RANK}\n[training]\nseq_len = 128\n[generator]\nkv_cache_gib = 0.1\n")
    command = [sys.executable, "-m", "titan_rl.cli", "serve", str(toml), "--run.dir", str(folder / "run"), "--json"]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, (folder / "log").read_text()[-3000:]
    below = running.descendants(process.pid)
    try:
        yield Served(**json.loads(line), run=folder / "run")
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == EXIT_OK, (folder / "log").read_text()[-3000:]
        asyncio.run(eventually(lambda: not [pid for pid in below if Path(f"/proc/{pid}").exists()], "all end", 20))


def _datum(tokens: list[int]) -> types.Datum:
    columns = {"target_tokens": tokens[1:], "weights": [0.0, *[1.0] * (len(tokens) - 2)]}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=columns)


def _taught(served: Served, seed: int, steps: int, kills: dict[int, str] | None = None) -> list[Any]:
    """What a client is told while it trains and samples; processes are killed before some steps."""
    client, told = served.client(), list[Any]()
    trainer = served.trainer(client, seed)
    for step in range(steps):
        if kills and step in kills:
            os.kill(served.pid_of(kills[step]), signal.SIGKILL)
        passes = [trainer.forward_backward([_datum(words)], "cross_entropy") for words in _WORDS]
        update = trainer.optim_step(_ADAM)
        told += [each.result().metrics["loss:sum"] for each in passes]
        told.append((update.result().metrics or {})["grad_norm:unclipped"])
        if step % 3 == 2:
            sampler = trainer.save_weights_and_get_sampling_client().result()
            parameters = types.SamplingParams(max_tokens=6, temperature=0.0)
            answer = sampler.sample(types.ModelInput.from_ints(_WORDS[0][:4]), 2, parameters).result()
            told += [(sequence.tokens, sequence.logprobs) for sequence in answer.sequences]
    client.close("success").result()
    return told


@pytest.fixture(scope="module")
def undisturbed(served) -> dict[int, list[Any]]:
    """By the seed of a client's adapter."""
    return {seed: _taught(served, seed, _STEPS) for seed in (1, 2)}


def test_what_is_sampled_is_what_was_trained(served):
    client = served.client()
    trainer = served.trainer(client, 1)
    for _ in range(4):
        trainer.forward_backward([_datum(words) for words in _WORDS], "cross_entropy").result()
        trainer.optim_step(_ADAM).result()
    words = types.ModelInput.from_ints(_WORDS[0])
    trained = trainer.forward([_datum(_WORDS[0])], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    sampler = trainer.save_weights_and_get_sampling_client().result()
    assert sampler.compute_logprobs(words).result()[1:] == pytest.approx(trained, abs=1e-5)
    base = client.create_sampling_client(base_model=served.base_model).result()
    untouched = served.trainer(client, 5).forward([_datum(_WORDS[0])], "cross_entropy").result()
    wanted = untouched.loss_fn_outputs[0]["logprobs"].data
    assert base.compute_logprobs(words).result()[1:] == pytest.approx(wanted, abs=1e-5)
    answer = sampler.sample(words, 3, types.SamplingParams(max_tokens=5, seed=1, stop=[])).result()
    assert [len(sequence.tokens) for sequence in answer.sequences] == [5, 5, 5]
    client.close("success").result()


def test_the_client_s_own_loss_is_that_of_the_server(served):
    client = served.client()
    data = [_datum(words) for words in _WORDS]

    def loss(data, logprobs):
        weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]
        return sum(-(w * p).sum() for w, p in zip(weights, logprobs, strict=True)), {"count": float(len(data))}

    norms = []
    for own in (True, False):
        trainer = served.trainer(client, 3)
        passing = (
            trainer.forward_backward_custom(data, loss) if own else trainer.forward_backward(data, "cross_entropy")
        )
        assert isinstance(passing.result().metrics["loss:sum"], float)
        norms.append((trainer.optim_step(_ADAM).result().metrics or {})["grad_norm:unclipped"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    client.close("success").result()


def test_deaths_of_trainer_and_generator_change_nothing(served, undisturbed):
    kills = {1: "trainer", 2: "generator", 4: "trainer"}
    assert _taught(served, 1, _STEPS, kills) == undisturbed[1]


def test_clients_side_by_side_are_each_as_alone(served, undisturbed):
    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(lambda seed: _taught(served, seed, _STEPS), undisturbed))
    assert told == list(undisturbed.values())


def test_a_client_that_comes_back_goes_on_where_it_was(served):
    first, losses = served.client(), []
    trainer = served.trainer(first, 4)
    for step in range(6):
        if step == 3:
            saved = trainer.save_state("half", user_metadata={"step": "3"}).result()
        losses.append(trainer.forward_backward([_datum(_WORDS[0])], "cross_entropy").result().metrics["loss:sum"])
        trainer.optim_step(_ADAM).result()
    first.close("success").result()
    back = served.client()
    trainer = back.create_training_client_from_state_with_optimizer(saved.path).result()
    runs = tinker.RestClient(base_url=served.base_url, api_key=served.api_key)
    [checkpoint] = runs.list_checkpoints(saved.path.split("/")[2]).result().checkpoints
    assert (checkpoint.tinker_path, checkpoint.user_metadata) == (saved.path, {"step": "3"})
    runs.delete_checkpoint_from_tinker_path(saved.path).result()
    for step in range(3, 6):
        if step == 4:  # what a repair begins from is not the checkpoint
            os.kill(served.pid_of("trainer"), signal.SIGKILL)
        loss = trainer.forward_backward([_datum(_WORDS[0])], "cross_entropy").result().metrics["loss:sum"]
        assert loss == losses[step]
        trainer.optim_step(_ADAM).result()
    back.close("success").result()


def _learn(served: Served, seed: int, file: Path, state: str | None = None, first: int = 0) -> None:
    """Losses and norms of a client's steps, a line each; every tenth step is saved."""
    client = served.client()
    if state is None:
        trainer = served.trainer(client, seed)
    else:
        trainer = client.create_training_client_from_state_with_optimizer(state).result()
    with open(file, "a", buffering=1) as lines:
        for step in range(first, _MANY_STEPS):
            passing, update = (
                trainer.forward_backward([_datum(_WORDS[step % 3])], "cross_entropy"),
                trainer.optim_step(_ADAM),
            )
            told = passing.result().metrics["loss:sum"], (update.result().metrics or {})["grad_norm:unclipped"]
            saved = trainer.save_state(f"at-{step}").result().path if step % 10 == 9 else None
            lines.write(json.dumps([step, told, saved]) + "\n")
    client.close("success").result()


def _learned(file: Path) -> list[tuple[int, list[float], str | None]]:
    """Whole lines of a client."""
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.confirms
def test_of_two_clients_one_is_killed_and_comes_back_and_both_curves_are_as_alone(served, tmp_path):
    for seed in (11, 12):
        _learn(served, seed, tmp_path / f"alone-{seed}")
    killed = tmp_path / "killed"
    killed.touch()
    child = multiprocessing.get_context("spawn").Process(target=_learn, args=(served, 12, killed))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(_learn, served, 11, tmp_path / "other")
        child.start()
        asyncio.run(eventually(lambda: len(_learned(killed)) > 26, "27 steps are done", 120))
        child.kill()
        child.join()
        lines = _learned(killed)
        assert len(lines) < _MANY_STEPS
        step, _, state = next(line for line in reversed(lines) if line[2])
        _learn(served, 12, tmp_path / "back", state, step + 1)
        other.result()
    alone = {seed: [line[:2] for line in _learned(tmp_path / f"alone-{seed}")] for seed in (11, 12)}
    back = [line[:2] for line in _learned(tmp_path / "back")]
    assert [line[:2] for line in _learned(tmp_path / "other")] == alone[11] and len(alone[11]) == _MANY_STEPS
    assert [line[:2] for line in lines] == alone[12][: len(lines)] and back == alone[12][step + 1 :]
    done = [(entry.model, entry.number) for entry in read_journal(served.run)]
    assert len(done) == len(set(done)), "no request was answered twice"


def test_a_loss_that_is_not_known_and_a_token_too_far_are_one_line_and_the_next_is_answered(served):
    client = served.client()
    trainer = served.trainer(client, 6)
    with pytest.raises(tinker.BadRequestError, match="vocabulary"):
        trainer.forward_backward([_datum([5, 6, 1 << 20])], "cross_entropy").result()
    client.close("errored").result()
    assert _taught(served, 7, 1)


def test_a_replay_of_the_requests_finds_the_same_bits_and_names_the_one_that_differs(served, undisturbed, tmp_path):
    count = len((served.run / "requests.jsonl").read_text().splitlines())
    copy = shutil.copytree(served.run, tmp_path / "copy")
    line = next(number for number, entry in enumerate(read_journal(copy), 1) if entry.kind == "optim_step")
    lines = (copy / "requests.jsonl").read_text().splitlines()
    other = json.loads(lines[line - 1]) | {"answer": "0" * 32}
    (copy / "requests.jsonl").write_text("\n".join([*lines[: line - 1], json.dumps(other), *lines[line:]]) + "\n")
    command = [sys.executable, "-m", "titan_rl.cli", "replay", str(copy), "--from", "1", "--to", str(count), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == EXIT_FAULT, ended.stderr[-3000:]
    told = json.loads(ended.stdout)
    assert told["different"] == [line] and sum(told["requests"].values()) == count


def test_without_the_key_nothing_is_answered(served):
    for headers in ({}, {"x-api-key": "tml-wrong"}, {"x-api-key": served.api_key[:-1]}):
        for path in ("healthz", "get_server_capabilities", "sessions"):
            assert httpx.get(f"{served.base_url}/api/v1/{path}", headers=headers).status_code == 403
    pid = running.descendants(os.getpid())
    assert all(served.api_key not in running.command_line(each) for each in pid)
    assert served.api_key not in "".join(file.read_text(errors="replace") for file in served.run.rglob("*.txt"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("[lora]\nrank = 0\n", "set [lora] rank"),
        ("[lora]\nrank = 4\n[rollout]\ntemperature = 0.5\n", "clients choose their own"),
        ("lora.rank = 4\ndrafter.path = 'there'\n", "no draft model learns what clients train"),
        ("[lora]\nrank = 4\n[generator]\nquantization = 'fp8_per_block'\n", "clients' losses do not weigh"),
        ("lora.rank = 4\nmodel.path = 'tiny-vision'\n", "serve passes on text alone"),
    ],
)
def test_a_service_that_cannot_be_is_one_line_before_anything_starts(settings, words, tmp_path, capsys):
    from titan_rl.cli import main
    from titan_rl.models.builtin.tiny import make_tiny

    (tmp_path / "serve.toml").write_text(settings)
    make_tiny(tmp_path / "there", seed=1, num_layers=1)
    assert main(["serve", str(tmp_path / "serve.toml"), "--run.dir", str(tmp_path / "run")]) == EXIT_USER
    assert words in capsys.readouterr().err and not (tmp_path / "run").exists()
