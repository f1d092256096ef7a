"""The keys and values of a batch: what transformers' own cache would hold, in memory that is taken once."""

import torch
from transformers.cache_utils import DynamicLayer

from tasks.key_values import Reserved, _groups


def test_a_layer_holds_what_transformers_own_would_and_moves_only_when_rows_leave() -> None:
    own, theirs = Reserved(9), DynamicLayer()  # type: ignore[no-untyped-call]
    rooms: list[torch.Tensor] = []
    for step, tokens in enumerate((4, 1, 1, 1, 1, 1)):
        if step == 3:
            for layer in (own, theirs):
                layer.batch_select_indices(torch.tensor([0, 2]))
        size = (2 if step >= 3 else 3, 2, tokens, 5)
        keys, values = torch.randn(size), torch.randn(size)
        for mine, other in zip(own.update(keys, values), theirs.update(keys, values), strict=True):
            assert torch.equal(mine, other)
        assert own.room is not None
        rooms.append(own.room[0])  # held, so that no other takes its place
        assert own.get_seq_length() == theirs.get_seq_length()
    assert len({room.data_ptr() for room in rooms}) == 2


def test_groups_are_of_prompts_about_as_long_unless_they_would_be_small() -> None:
    lengths = [100, 90, 50, 48, 47, 10, 2, 1]
    assert list(_groups(lengths, 100)) == [(0, 2), (2, 5), (5, 8)]
    assert list(_groups(lengths, 10_000)) == [(0, 8)]
    assert list(_groups([7] * 50, 1)) == [(0, 50)]
