"""Small faults, planted one at a time into a copy of the tree, and the tests that name each.

    python tests/planted_faults.py               # all of them
    python tests/planted_faults.py NAME...       # these
    python tests/planted_faults.py --list        # the rows of the table in tests/README.md

A fault is seen if each of its witnesses fails with it, having passed without it. Exit code 1 if one is not seen, or if
a witness fails in the tree as it is.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
COPIED = ("titan_rl", "actors", "kernels", "tests", "configs", "scripts", "examples", "pyproject.toml")
TIMEOUT = 30
"""Seconds for one test: with a fault in a deadline, a witness may hang."""
RUN = """
import sys, titan_rl
assert titan_rl.__file__.startswith(sys.argv[1] + "/"), f"{titan_rl.__file__} is not the copy's"
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


@dataclass(frozen=True)
class Fault:
    """A wrong line that somebody could write."""

    name: str
    says: str
    """What goes wrong with it."""
    file: str
    anchor: str
    """What is there, exactly once in the file."""
    wrong: str
    """What stands in its place."""
    witnesses: tuple[str, ...]
    """Tests that fail with it, as ``file::name`` below tests/; of a parametrized one, at least one case."""

    def row(self) -> str:
        """Its line in the table of tests/README.md."""
        witnesses = ", ".join(f"`{witness}`" for witness in self.witnesses)
        return f"| `{self.name}` | {self.says} | `{self.file}` | {witnesses} |"


FAULTS = (
    Fault(
        "loss_mask_shifted_by_one",
        "The token before each of the model's tokens is trained in its place",
        "titan_rl/data/batches/packing.py",
        "np.flatnonzero(is_model(sample.provenance))",
        "np.flatnonzero(is_model(np.roll(sample.provenance, -1)))",
        ("data/test_packing.py::test_each_trained_token_is_predicted_once_from_its_own_past",),
    ),
    Fault(
        "packed_row_sees_its_neighbour",
        "A segment without a prefix sees all that stands before it in its row",
        "titan_rl/data/batches/packing.py",
        "Segment(self.size, length, prefix)",
        "Segment(self.size, length, prefix or ((0, self.size),) * (self.size > 0))",
        ("data/test_packing.py::test_each_trained_token_is_predicted_once_from_its_own_past",),
    ),
    Fault(
        "loss_normalized_by_microbatch",
        "Weights sum to 1 in each packed row, not in the batch of the step",
        "titan_rl/data/batches/packing.py",
        "np.repeat(weights, counts)",
        "np.repeat(weights / np.dot(weights, counts), counts)",
        ("data/test_packing.py::test_layout_changes_no_weight",),
    ),
    Fault(
        "penalty_counts_off_by_one",
        "A token's penalties count the token itself",
        "titan_rl/models/layers/penalties.py",
        'np.searchsorted(place_S, np.arange(first, place_S[-1]), side="right")',
        'np.searchsorted(place_S, np.arange(first, place_S[-1]), side="left")',
        ("models/layers/test_penalties.py::test_each_token_has_vllms_logits",),
    ),
    Fault(
        "second_answer_counts_from_the_first",
        "Penalties count a conversation's later answers from the beginning of the first",
        "titan_rl/algorithms/batches/batching.py",
        "starts=tuple(turn.start for turn in rollout.turns) if",
        "starts=tuple(turn.start for turn in rollout.turns[:1]) if",
        ("diagnostics/doctor/test_doctor_masks.py::test_penalties_count_from_the_answer_that_a_token_is_in",),
    ),
    Fault(
        "branch_counts_from_its_rollout",
        "Penalties of a later branch count from places in the whole rollout",
        "titan_rl/algorithms/batches/batching.py",
        "tuple(place - start for place in sample.starts if start <= place < stop)",
        "tuple(place for place in sample.starts if place < stop - start)",
        ("diagnostics/doctor/test_doctor_masks.py::test_penalties_count_from_the_answer_that_a_token_is_in",),
    ),
    Fault(
        "forced_token_trained",
        "A closing of thinking that a budget forced counts as the model's",
        "titan_rl/environments/conversation/episode.py",
        "np.where(completion.forced, Provenance.FORCED, origin)",
        "np.where(completion.forced, Provenance.MODEL, origin)",
        ("environments/conversation/test_episode.py::test_a_forced_token_is_kept_and_is_not_the_models",),
    ),
    Fault(
        "advantage_sign_flipped",
        "The group's mean less the reward",
        "titan_rl/algorithms/arithmetic/advantages.py",
        "return rewards_G - rewards_G.mean()",
        "return rewards_G.mean() - rewards_G",
        ("algorithms/formulas/test_advantages_losses.py::test_grpo_by_hand",),
    ),
    Fault(
        "kl_sign_flipped",
        "The log-ratio of policy to reference, upside down",
        "kernels/policy_loss.py",
        "x_S = reference_logprob_S - logprob_S",
        "x_S = logprob_S - reference_logprob_S",
        ("algorithms/formulas/test_policy_gradient_formulas.py::test_loss_and_gradient_are_the_published_ones",),
    ),
    Fault(
        "peers_of_another_seat",
        "A sample is compared with samples of other seats, too",
        "titan_rl/algorithms/batches/batching.py",
        "if rollout.seat == seat]",
        "if rollout.seat == seat or seat]",
        (
            "environments/servers/test_agents.py::test_seats_have_a_sample_and_a_reward_each_and_are_compared_with_their_own",
        ),
    ),
    Fault(
        "timed_out_sample_trained",
        "A sample that ran into a timeout reaches the loss",
        "titan_rl/algorithms/batches/batching.py",
        "for rollout in written if rollout.is_scored]",
        "for rollout in written if rollout.status != 'infra_error']",
        ("data/test_packing.py::test_what_may_reach_the_loss",),
    ),
    Fault(
        "discarded_sample_settled_again",
        "The ledger lets a discarded sample become a trained one",
        "titan_rl/records/ledger/ledger.py",
        "when old.state != 'pending' and",
        "when old.state = 'trained' and",
        ("records/ledger/test_ledger.py::test_the_database_itself_refuses_to_settle_twice",),
    ),
    Fault(
        "staleness_bound_off_by_one",
        "One batch more is admitted than `max_staleness` allows",
        "titan_rl/controller/loop/admission.py",
        "(self.version + 1 + self.max_staleness)",
        "(self.version + 2 + self.max_staleness)",
        ("controller/test_staleness.py::test_no_group_lags_behind_the_bound",),
    ),
    Fault(
        "held_out_prompt_trained",
        "The training stream does not pass held-out prompts over",
        "titan_rl/environments/prompts/stream.py",
        "if not self.task.is_held_out(prompt) and (",
        "if (",
        ("environments/prompts/test_prompts.py::test_training_and_held_out_share_no_text",),
    ),
    Fault(
        "seed_by_place_in_the_request",
        "A seed is named by the order in a request, not by the sample",
        "titan_rl/environments/conversation/episode.py",
        "named_seed(self.seed, self.prompt.id, sample, turn) for sample in samples",
        "named_seed(self.seed, self.prompt.id, place, turn) for place in range(len(samples))",
        (
            "environments/conversation/test_episode.py::test_seeds_are_named_by_prompt_sample_and_turn_whatever_the_order",
        ),
    ),
    Fault(
        "tokens_of_a_tool_taken_for_the_models",
        "A tool's reply has the model's provenance, and is trained",
        "titan_rl/data/text/turns.py",
        "np.where(is_reply, Provenance.TOOL, Provenance.TEMPLATE).astype(np.int8)\n    return tokens[start:]",
        "np.where(is_reply, Provenance.MODEL, Provenance.TEMPLATE).astype(np.int8)\n    return tokens[start:]",
        ("environments/conversation/test_chat.py::test_template_reply_and_model_are_told_apart",),
    ),
    Fault(
        "control_token_of_a_row",
        "A row's text becomes the beginning of a turn",
        "titan_rl/data/text/turns.py",
        "plain_messages = messages if is_plain else _plain(tokenizer, messages)",
        "plain_messages = messages",
        ("data/test_text.py::test_nobodys_text_becomes_a_control_token",),
    ),
    Fault(
        "reply_by_another_template",
        "Replies are written by the template's variant without tools",
        "titan_rl/data/text/chat_template.py",
        "_reply_template(tokenizer, role, count, json.dumps(list(tools)))",
        "_reply_template(tokenizer, role, count, json.dumps([]))",
        ("data/test_text.py::test_a_reply_is_the_templates_rendering",),
    ),
    Fault(
        "answer_tokenized_by_itself",
        "An answer is taught with a space that the model would not write",
        "titan_rl/data/text/tokenizer.py",
        "    if not _writes_a_space(tokenizer):",
        "    if _writes_a_space(tokenizer):",
        ("data/test_text.py::test_an_answer_behind_other_text_has_no_space_of_its_own",),
    ),
    Fault(
        "text_tokenized_again",
        "A later turn is asked with tokens made anew from text",
        "titan_rl/environments/conversation/episode.py",
        "self.ask(self.request(episode.tokens, [sample]",
        "self.ask(self.request(np.array(self.tokenizer.encode(self.tokenizer.decode(episode.tokens), "
        "add_special_tokens=False), np.int32), [sample]",
        ("environments/conversation/test_provenance.py::test_every_token_is_whose_it_says_and_as_the_engine_gave_it",),
    ),
    Fault(
        "failed_environment_paid_as_zero",
        "An environment's failure is a reward of 0",
        "titan_rl/environments/conversation/episode.py",
        "Score(self.failure[0], {}, self.failure[1])",
        'Score("ok", {}, self.failure[1])',
        ("environments/test_environments.py::test_one_that_fails_is_never_a_reward",),
    ),
    Fault(
        "scorers_nonsense_paid_as_zero",
        "What is no score is a reward of 0",
        "titan_rl/environments/scoring/scoring_process.py",
        'Score("infra_error", {}, "invalid reply of the scorer")',
        'Score("ok", {}, "invalid reply of the scorer")',
        ("environments/rewards/test_scoring.py::test_what_is_no_score_is_no_reward_of_zero",),
    ),
    Fault(
        "verdict_by_the_programs_equality",
        "A program's value is compared by `==`, so 3.0 and `True` pass for 3 and 1",
        "titan_rl/environments/tasks/code/code_tests.py",
        "same(result.value, test.expected)",
        "result.value == test.expected",
        ("environments/tasks/code/test_code_task.py::test_a_verdict_tells_types_apart",),
    ),
    Fault(
        "stale_weight_version_accepted",
        "Any complete version in the slot is taken for the one asked for",
        "titan_rl/mesh/channel/reader.py",
        "if stamp == target.stamp:",
        "if stamp >= 0:",
        (
            "mesh/channel/test_channel.py::test_the_version_before_the_one_that_is_wanted_is_not_taken_for_it",
            "mesh/channel/test_channel.py::test_a_superseded_version_is_refused_at_once",
        ),
    ),
    Fault(
        "half_written_version_accepted",
        "A slot that is being written counts as complete",
        "titan_rl/mesh/channel/reader.py",
        "if stamp == target.stamp:",
        "if stamp in (target.stamp, -1):",
        ("mesh/channel/test_channel.py::test_a_version_that_is_being_written_is_waited_for",),
    ),
    Fault(
        "checksum_of_a_block_not_compared",
        "A block's checksum is made, but not compared",
        "titan_rl/mesh/channel/sources.py",
        "if int(digest) != int(",
        "if not int(digest) and int(",
        (
            "mesh/channel/test_channel.py::test_a_flipped_byte_is_seen",
            "mesh/channel/test_channel.py::test_a_torn_read_is_read_again",
        ),
    ),
    Fault(
        "repair_restores_the_new_rank_alone",
        "After a repair the survivors keep a state of another step",
        "titan_rl/mesh/control/trainer_snapshots.py",
        "for rank, process in enumerate(self.trainers.ranks)\n        ]",
        "for rank, process in enumerate(self.trainers.ranks) if rank in handles\n        ]",
        ("mesh/control/test_trainers.py::test_every_rank_goes_back_to_the_common_step",),
    ),
    Fault(
        "repair_of_one_of_two_dead_ranks",
        "Of several dead ranks one is replaced",
        "titan_rl/mesh/members/trainers.py",
        "for rank, process in dead.items():",
        "for rank, process in [*dead.items()][:1]:",
        ("mesh/control/test_trainers.py::test_each_dead_rank_is_replaced_and_no_other",),
    ),
    Fault(
        "snapshot_later_than_the_run_restored",
        "A repair goes on from a step that the run never counted",
        "titan_rl/mesh/control/trainer_snapshots.py",
        "for step in steps if step <= at_most)",
        "for step in steps)",
        (
            "mesh/control/test_trainer_repair.py::test_a_dead_rank_is_replaced_and_the_step_begun_again",
            "mesh/control/test_trainers.py::test_the_step_to_go_back_to_is_the_newest_of_all_that_the_run_has_done",
        ),
    ),
    Fault(
        "deadline_that_never_fires",
        "A wait has no timeout",
        "titan_rl/mesh/processes/deadlines.py",
        "asyncio.wait({work}, timeout=seconds)",
        "asyncio.wait({work}, timeout=None)",
        ("mesh/control/test_waiting.py::test_deadline_names_what_it_waits_for",),
    ),
    Fault(
        "hung_actor_waited_for",
        "A call waits for an actor that hangs",
        "titan_rl/mesh/supervision/calls.py",
        "max(left, 0)",
        "None",
        ("mesh/processes/test_calls.py::test_all_that_hang_are_ended_at_the_deadline",),
    ),
    Fault(
        "checkpoint_committed_after_the_first_rank",
        "A checkpoint is renamed before every rank has written",
        "titan_rl/controller/recovery/checkpointing.py",
        "if None not in outcomes:",
        'if "" in outcomes:',
        ("records/test_checkpoint_folder.py::test_it_is_committed_when_the_last_rank_has_written",),
    ),
    Fault(
        "damaged_checkpoint_taken_by_its_size",
        "A checkpoint's file is compared by size alone",
        "titan_rl/records/checkpoints/checkpoints.py",
        "if actual != expected:",
        'if actual["bytes"] != expected["bytes"]:',
        ("records/test_checkpoint_folder.py::test_a_damaged_checkpoint_is_recognised_and_the_one_before_is_taken",),
    ),
    Fault(
        "judgement_said_saved_before_it_is_on_disk",
        "A person's choice is called saved while it is in the system's memory only",
        "titan_rl/records/preferences/journal.py",
        "_write_all(self._descriptor, data)\n                os.fsync(self._descriptor)",
        "_write_all(self._descriptor, data)",
        ("records/preferences/test_journal.py::test_it_is_synced_before_append_returns",),
    ),
    Fault(
        "verdict_from_the_judges_reasoning",
        "A judge's verdict is the first that its reply names, where an answer's own words may stand",
        "titan_rl/diagnostics/principles/verdicts.py",
        "_VERDICT.fullmatch(lines[-1].strip()) if lines else None",
        "_VERDICT.search(reply)",
        ("records/preferences/test_principles.py::test_a_verdict_is_the_last_line_alone",),
    ),
    Fault(
        "failed_run_exits_with_0",
        "A run that ends by a fault has exit code 0",
        "titan_rl/train.py",
        "_why(fault), EXIT_FAULT",
        "_why(fault), EXIT_OK",
        ("controller/test_endings.py::test_a_fault_is_never_exit_code_0",),
    ),
)


def plant(fault: Fault, tree: Path) -> None:
    """Errors: ValueError if the anchor is not there exactly once."""
    path = tree / fault.file
    text = path.read_text()
    if (count := text.count(fault.anchor)) != 1:
        raise ValueError(f"{fault.name}: {fault.anchor!r} is {count} times in {fault.file}")
    path.write_text(text.replace(fault.anchor, fault.wrong))


def copy_tree(to: Path) -> Path:
    """What tests need; links stay links."""
    to.mkdir()
    for name in COPIED:
        if (TREE / name).is_dir():
            shutil.copytree(TREE / name, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(TREE / name, to / name)
    return to


def failures(tree: Path, witnesses: Iterable[str]) -> dict[str, str]:
    """The tests that fail in a copy, as ``file::name``, each with the assertion that did not hold.

    Errors: RuntimeError if pytest ran no test.
    """
    report = tree / "report.xml"
    nodes = [f"tests/{witness}" for witness in dict.fromkeys(witnesses)]
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        f"timeout={TIMEOUT}",
        f"--junitxml={report}",
        "-o",
        "xfail_strict=1",
    ]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-c", RUN, str(tree), *options, *nodes]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    cases = ElementTree.parse(report).getroot().findall(".//testcase") if report.exists() else []
    if done.returncode not in (0, 1) or not cases:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    found = {}
    for case in cases:
        for problem in (*case.findall("failure"), *case.findall("error")):
            file = case.get("classname", "").removeprefix("tests.").replace(".", "/")
            found[f"{file}.py::{case.get('name', '').partition('[')[0]}"] = _assertion(problem)
    return found


def _assertion(problem: ElementTree.Element) -> str:
    """In one line, which pytest begins with an E."""
    lines = [line[1:].strip() for line in (problem.text or "").splitlines() if line.startswith("E ")]
    said = " ".join([line for line in lines if line and line != "AssertionError:"][:1])
    return (said or " ".join(problem.get("message", "").split()))[:150]


def check(faults: Iterable[Fault]) -> bool:
    """Report on each; whether all are seen, by witnesses that pass without them."""
    faults = list(faults)
    with tempfile.TemporaryDirectory(prefix="planted_") as folder:
        place = Path(folder).resolve()
        before = failures(copy_tree(place / "clean"), (each for fault in faults for each in fault.witnesses))
        for witness, why in before.items():
            print(f"{witness} fails without any fault: {why}")
        are_seen = True
        for fault in faults:
            tree = copy_tree(place / fault.name)
            plant(fault, tree)
            found = failures(tree, fault.witnesses)
            is_seen = set(fault.witnesses) <= set(found)
            are_seen = are_seen and is_seen
            print(f"{fault.name}: {'named' if is_seen else 'NOT SEEN'}", flush=True)
            for witness, why in found.items():
                print(f"    {witness}: {why}", flush=True)
            shutil.rmtree(tree)
    return are_seen and not before


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plant faults, and see whether tests name them.")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="only print the rows of the table")
    options = parser.parse_args(arguments)
    by_name = {fault.name: fault for fault in FAULTS}
    if unknown := set(options.names) - set(by_name):
        parser.error(f"no fault is called {', '.join(sorted(unknown))}")
    chosen = [by_name[name] for name in options.names] or FAULTS
    if options.list:
        for fault in chosen:
            print(fault.row())
        return 0
    return 0 if check(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
