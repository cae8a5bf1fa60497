"""Which curves a run has: every metric that it records, known ones together, the rest by themselves."""

import json

import pytest

from titan_rl.records.plot import OTHERS, curves_of, figure_of, panels_of

STEP = {
    **{"step": 1, "reward": 0.5, "loss": 0.1, "grad_norm": 1.0, "learning_rate": 1e-6, "reference_kl": 0.01},
    **{"clip_fraction": 0.1, "response_length": 12.0, "truncated": 0.0, "tokens_per_second_step": 900.0},
    **{
        "reward_part/format": 0.1,
        "reward_part/right": 0.4,
        "reward/sums": 0.4,
        "accuracy/sums": 0.4,
        "prompts/sums": 1.0,
    },
    **{"agreement_mean": 1.0, "my_metric": 3.0, "alarm_reward_gap": 0.0, "seconds_step": 1.0},
}


def by_name(names) -> dict[str, str]:
    """The title of each metric's panel."""
    return {name: panel.title for panel in panels_of(names) for name in panel.names}


def test_every_metric_has_one_panel():
    shown = [name for panel in panels_of(curves_of([STEP])) for name in panel.names]
    assert len(shown) == len(set(shown))
    assert set(shown) == set(STEP) - {"step", "agreement_mean", "alarm_reward_gap"} | {"disagreement"}


def test_metrics_that_belong_together_stand_together_and_others_last():
    found = by_name(curves_of([STEP]))
    assert found["reward_part/format"] == found["reward_part/right"] == "parts of the reward"
    assert found["reward/sums"] != found["reward"]
    panels = panels_of(curves_of([STEP]))
    assert [panel.names for panel in panels if panel.group == OTHERS] == [("my_metric",)]
    assert panels[-1].group == OTHERS


def test_a_run_that_has_only_begun_has_the_panels_of_what_it_recorded():
    """Its first record is the held-out accuracy, without a reward; the others come with the first step."""
    begun = panels_of(curves_of([{"step": 0, "held_out_accuracy": 0.1}]))
    assert [panel.title for panel in begun] == ["held-out accuracy"]
    later = panels_of(curves_of([{"step": 0, "held_out_accuracy": 0.1}, STEP]))
    assert {"reward of the samples", "gradient norm"} <= {panel.title for panel in later}
    assert panels_of([]) == []


def test_exact_agreement_is_drawn_as_what_fp32_rounds_away():
    assert curves_of([STEP])["disagreement"] == [(1, 1e-7)]


@pytest.mark.parametrize("steps", [1, 3])
def test_axes_of_steps_have_whole_numbers(tmp_path, steps):
    lines = [json.dumps(STEP | {"step": step}) for step in range(1, steps + 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    figure = figure_of(tmp_path)
    assert figure is not None
    drawn = [axis for axis in figure.axes if axis.lines]
    assert len(drawn) == len([p for p in panels_of(curves_of([STEP])) if p.group in ("Learning", "Update")])
    assert all(tick == round(tick) for axis in drawn for tick in axis.get_xticks())


def test_nothing_is_drawn_of_nothing(tmp_path):
    assert figure_of(tmp_path) is None
