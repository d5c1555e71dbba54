"""Rows of like length together: what is cut is padding, and no loss depends on it."""

from itertools import pairwise

import jax
import numpy as np
import pytest
import tiny
from tiny_tasks import random_features

from electra_jax.finetune.buckets import choose_widths, make_buckets, trimmed
from electra_jax.finetune.heads.span import Spans
from electra_jax.finetune.objective import FineTuning
from electra_jax.objectives.base import Inputs


def test_rows_are_cut_to_one_of_few_widths():
    """Nothing but padding is lost, no row is, and no choice of two widths leaves less padding."""
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(3, 12, 60), rng.integers(30, 49, 19), [49]])
    rng.shuffle(lengths)
    shape = len(lengths), 50
    ids = np.where(np.arange(50) < lengths[:, None], rng.integers(5, 99, shape), 0)
    arrays = {
        "input_ids": ids.astype(np.int32),
        "segment_ids": (ids > 0).astype(np.int32),
        "label": rng.random((80, 7), np.float32),
    }
    buckets = make_buckets(arrays, num_widths=2, batch_size=2)
    found = []
    for (begin, end), width in zip(pairwise(buckets.groups), buckets.widths, strict=True):
        batch = buckets.batch(np.arange(begin, end))
        assert batch["input_ids"].shape == batch["segment_ids"].shape == (end - begin, width)
        assert batch["label"].shape == (end - begin, 7)
        padded = np.pad(batch["input_ids"], ((0, 0), (0, 50 - width)))
        found += np.concatenate([padded, batch["label"]], axis=1).tolist()
    assert sorted(found) == sorted(np.concatenate([ids, arrays["label"]], axis=1).tolist())
    cost = lambda width: np.where(lengths <= width, width, 50).sum()  # noqa: E731
    narrow, wide = buckets.widths
    assert wide == 50
    assert cost(narrow) == min(cost(width) for width in range(8, 50, 8))
    assert buckets.mean_width == cost(narrow) / 80


@pytest.mark.parametrize("longest, width", [(3, 32), (32, 32), (33, 64), (70, 96)])
def test_what_is_padding_in_all_rows_is_not_predicted(longest, width):
    lengths = np.array([3, longest])
    arrays = {
        "segment_ids": (np.arange(96) < lengths[:, None]).astype(np.int32),
        "label": np.zeros((2, 96), np.float32),
    }
    found = trimmed(arrays)
    assert found["segment_ids"].sum() == 3 + longest
    assert found["segment_ids"].shape == (2, width)
    assert found["label"].shape == (2, 96)


def test_widths_have_rows_enough():
    lengths = np.repeat([5, 20, 44], [100, 3, 50])
    assert choose_widths(lengths, 4, min_rows=4) == (8, 48)
    assert choose_widths(lengths, 4, min_rows=3) == (8, 24, 48)
    assert choose_widths(lengths, 1, min_rows=3) == (48,)
    assert choose_widths(lengths, 4, min_rows=999) == (48,)


def test_widths_change_no_loss():
    objective = FineTuning(tiny.encoder(init_stddev=0.2), Spans())
    arrays = random_features(8) | {name: np.zeros(8, np.int32) for name in ("start", "end")}
    arrays |= {"is_impossible": np.ones(8, np.int32), "allowed": np.zeros((8, 8), np.int32)}
    arrays["allowed"][:, 1:4] = 1
    wide = {name: np.pad(x, ((0, 0), (0, 4))) if x.ndim == 2 else x for name, x in arrays.items()}
    del wide["example"]
    params = objective.init(jax.random.key(0))
    losses = []
    for batch in (wide, make_buckets(wide, 1, 8).batch(np.arange(8))):
        arrays = {name: jax.numpy.asarray(x) for name, x in batch.items()}
        losses.append(objective.sums(params, Inputs(arrays, (), jax.random.key(0))))
    assert batch["allowed"].shape == (8, 8)
    for name, value in losses[0].items():
        np.testing.assert_allclose(losses[1][name], value, rtol=1e-5, err_msg=name)
