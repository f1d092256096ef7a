"""Batches: the same whether they were made ahead or not, and whatever was asked for before."""

import numpy as np
import pytest

from training.data import Windows


@pytest.mark.parametrize(("ahead", "workers"), [(0, 0), (1, 0), (3, 2)])
def test_what_is_fed_depends_on_the_position_alone(ahead: int, workers: int) -> None:
    import torch

    from training.feed import Ask, Feed

    windows = Windows(np.arange(1000, dtype=np.int32), 9, seed=3)
    asks = [Ask(position, 2) for position in range(0, 300, 2)]  # beyond an epoch of 111
    with Feed(windows, torch.device("cpu"), ahead, workers) as feed:
        for place, ask in enumerate(asks):
            following = asks[place + 1 :] if place % 5 else [Ask(999, 1)]  # now and then a plan that changes
            assert feed.take(ask, following).equal(windows.at(ask.position, ask.count))
            assert len(feed.ready) <= ahead
