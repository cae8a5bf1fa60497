"""Who hears of a death hears in a fixed order, whoever registered first."""

import random
from functools import partial
from typing import get_args

from titan_rl.mesh.supervision.deaths import DeathHandlers, Owner, Stage

ORDER = ["host", "record", "standby", "spare", "generator", "verifier", "peers", "snapshots"]


def test_owners_hear_stage_by_stage_in_whatever_order_they_registered():
    for seed in range(20):
        heard, deaths = [], DeathHandlers()
        for owner in random.Random(seed).sample(ORDER, len(ORDER)):
            deaths.register(owner, partial(lambda heard, owner, process: heard.append((owner, process)), heard, owner))
        deaths.run("generator 1")
        assert heard == [(owner, "generator 1") for owner in ORDER]


def test_every_owner_has_one_stage():
    assert sorted(owner for stage in Stage for owner in stage.value) == sorted(get_args(Owner))


def test_an_owner_that_registers_again_hears_once():
    heard, deaths = [], DeathHandlers()
    for number in (1, 2):
        deaths.register("verifier", lambda process, number=number: heard.append(number))
    deaths.run(None)
    assert heard == [2]
