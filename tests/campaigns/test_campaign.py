"""Kill, relaunch, judge; see `campaign.py`. ``--campaign=N`` makes N kills, 200 by default."""

from __future__ import annotations

import os

import pytest

from tests.mpi.harness import needs_mpi

from .campaign import Campaign

SEED = int(os.environ.get("CAMPAIGN_SEED", "1"))


@needs_mpi
@pytest.mark.campaign
@pytest.mark.timeout(4 * 3600)
def test_every_kill_is_recovered_from(request: pytest.FixtureRequest) -> None:
    kills = request.config.getoption("--campaign") or 200
    campaign = Campaign(kills, SEED)
    campaign.run()
    print(
        f"\n{campaign.kills.total()} kills: {dict(campaign.kills)}; {campaign.judged} restores, {campaign.exact} exact"
    )
    assert campaign.judged > 0
    assert campaign.kills.total() >= kills
