import math
import time
from collections.abc import Sequence

import grain
import numpy as np
import pytest
from stores import rows_of

from electra_jax.data.layout import BEGINS_PIECE, ENDS_SEGMENT, Rows
from electra_jax.data.loader import eval_batches, train_batch, train_batches
from electra_jax.data.store import Tokens, offsets
from electra_jax.errors import UserError

NUM_ROWS = 50
STEPS = (0, 1, 1000, 1_000_000)


def make_rows(tokens: Tokens, groups: Sequence[int]) -> Rows:
    """Groups of so many rows of one piece with one token, whose id tells the row."""
    n = sum(groups)
    marks = [BEGINS_PIECE | ENDS_SEGMENT] * n
    return rows_of(
        tokens, range(n), [1] * n, marks, range(n + 1), length=4, groups=offsets([*groups])
    )


TOKENS = Tokens([np.arange(100, 1000, dtype=np.uint16)])


@pytest.fixture(scope="module")
def rows() -> Rows:
    return make_rows(TOKENS, [NUM_ROWS])


@pytest.fixture(scope="module")
def mapped_rows(tmp_path_factory) -> Rows:
    """Rows of two groups over a file, as those of a store are."""
    path = tmp_path_factory.mktemp("loader") / "tokens.npy"
    np.save(path, np.arange(100, 100 + NUM_ROWS, dtype=np.uint16))
    return make_rows(Tokens([path]), [NUM_ROWS - 10, 10])


def test_whole_batches_of_one_group_take_turns():
    """Each group's rows come once an epoch, and the order of the groups depends on no seed."""
    sizes = (24, 8, 16)  # of the groups
    rows = make_rows(TOKENS, sizes)
    options = {"batch_size": 8, "weights": (3.0, 1.0, 2.0), "one_group": True}
    turns = {}
    for seed in (0, 1):
        batches = [rows_in(train_batch(rows, step, seed=seed, **options)) for step in range(12)]
        turns[seed] = [np.searchsorted(rows.groups, batch, side="right") - 1 for batch in batches]
        assert all(len(set(groups)) == 1 for groups in turns[seed])
        for epoch in (batches[:6], batches[6:]):
            assert sorted(row for batch in epoch for row in batch) == list(range(48))
        assert batches[:6] != batches[6:]
    np.testing.assert_array_equal(turns[0], turns[1])
    parts = [
        rows_in(train_batch(rows, 5, seed=1, process_index=i, process_count=2, **options))
        for i in (0, 1)
    ]
    assert parts[0] + parts[1] == batches[5]


def rows_in(batch: dict[str, np.ndarray]) -> list[int]:
    return (batch["input_ids"][:, 1] - 100).tolist()


def visited(rows: Rows, num_rows: int, *, batch_size: int, **options) -> list[int]:
    steps = -(num_rows // -batch_size)
    batches = (train_batch(rows, step, batch_size=batch_size, **options) for step in range(steps))
    return [row for batch in batches for row in rows_in(batch)][:num_rows]


def test_order_of_one_group_is_grains_shuffle(rows):
    epochs = {}
    for seed, batch_size in ((0, 12), (0, 75), (1, 12)):  # neither divides 50
        (own_seed,) = np.random.SeedSequence(seed).generate_state(1).tolist()
        shuffled = grain.MapDataset.range(NUM_ROWS).shuffle(own_seed)
        order = visited(rows, 3 * NUM_ROWS, batch_size=batch_size, seed=seed)
        assert order == [shuffled[index] for index in range(3 * NUM_ROWS)]
        epochs[seed] = np.reshape(order, (3, NUM_ROWS)).tolist()
        assert [sorted(epoch) for epoch in epochs[seed]] == [[*range(NUM_ROWS)]] * 3
    # Nor is the next seed the same sequence of epochs, begun one later.
    assert len({tuple(epoch) for epoch in epochs[0] + epochs[1]}) == 6


@pytest.mark.parametrize("process_count", [1, 2, 4])
@pytest.mark.parametrize("step", STEPS)
def test_hosts_together_hold_the_global_batch(mapped_rows, step, process_count):
    options = {"batch_size": 8, "seed": 0, "weights": (3.0, 1.0)}
    whole = train_batch(mapped_rows, step, **options)
    parts = [
        train_batch(mapped_rows, step, **options, process_index=index, process_count=process_count)
        for index in range(process_count)
    ]
    for key, array in whole.items():
        np.testing.assert_array_equal(np.concatenate([part[key] for part in parts]), array)
    assert whole["row"].tolist() == list(range(8))
    assert whole["row"].dtype == np.int32


def test_any_step_is_instant(rows):
    started = time.monotonic()
    train_batch(rows, 1_000_000, batch_size=8, seed=0)
    train_batch(rows, 10**12, batch_size=8, seed=0)
    next(train_batches(rows, 1_000_000, 10_000_000, batch_size=8, seed=0))
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_prefetched_batches_are_the_same_in_the_same_order(mapped_rows, num_threads):
    share = {"batch_size": 8, "seed": 3, "process_index": 1, "process_count": 2}
    share["weights"] = (3.0, 1.0)
    batches = list(train_batches(mapped_rows, 20, 30, **share, num_threads=num_threads, prefetch=4))
    assert len(batches) == 30
    for step, batch in enumerate(batches, start=20):
        for key, array in train_batch(mapped_rows, step, **share).items():
            np.testing.assert_array_equal(batch[key], array)


# Groups


@pytest.mark.parametrize(
    ("weights", "bound"),
    [
        ((0.7, 0.3), 1),
        ((1.0, 3.0, 2.0), 1),
        ((0.25, 0.25, 0.25, 0.25), 1),
        ((1e-3, 1.0, 0.1, 5.0), 1),
        ((0.1, 1 / 3, 2.0, 0.04, 0.3, 1.0, 1.0, 0.7), 1.5),
    ],
)
def test_groups_take_turns_in_exact_proportion(weights, bound):
    rows = make_rows(TOKENS, [40] * len(weights))
    group = np.array(visited(rows, 3000, batch_size=100, seed=0, weights=weights)) // 40
    shares = np.array(weights) / sum(weights)
    counts = np.cumsum(group[:, None] == np.arange(len(weights)), axis=0)
    off = np.abs(counts - shares * np.arange(1, 3001)[:, None])
    assert off.max() < bound


def test_proportion_is_exact_however_far():
    rows = make_rows(TOKENS, [30, 20])
    for step in (10**6, 10**9, 10**15):
        batch = train_batch(rows, step, batch_size=10, seed=0, weights=(0.7, 0.3))
        assert sum(row < 30 for row in rows_in(batch)) == 7


def test_each_epoch_of_a_group_visits_its_rows_once_in_another_order():
    sizes, weights = (30, 30, 7), (2.0, 2.0, 1.0)
    rows = make_rows(TOKENS, sizes)
    order = np.array(visited(rows, 400, batch_size=12, seed=0, weights=weights))
    orders = []
    for begin, size in zip((0, 30, 60), sizes, strict=True):
        of_group = order[(begin <= order) & (order < begin + size)] - begin
        epochs = of_group[: of_group.size // size * size].reshape(-1, size)
        assert len(epochs) >= 5
        np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(size), (len(epochs), 1)))
        assert len(np.unique(epochs, axis=0)) == len(epochs)
        orders.append(epochs[0].tolist())
    assert orders[0] != orders[1]  # of groups of the same size


def test_scale_of_weights_does_not_matter():
    rows = make_rows(TOKENS, [30, 20])
    one, other = (
        visited(rows, 500, batch_size=20, seed=0, weights=weights)
        for weights in ((3.0, 1.0), (75.0, 25.0))
    )
    assert one == other


@pytest.mark.parametrize(
    "weights", [(1.0,), (1.0, 1.0, 1.0), (1.0, 0.0), (1.0, -1.0), (1.0, math.nan), (1.0, math.inf)]
)
def test_one_weight_above_zero_is_needed_for_each_group(weights):
    rows = make_rows(TOKENS, [30, 20])
    with pytest.raises(UserError, match=r"^weights: .*\(1.* 0 .* 2 groups"):
        train_batch(rows, 0, batch_size=8, seed=0, weights=weights)


# Evaluation


@pytest.mark.parametrize("process_count", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [8, 20, 100])
def test_evaluation_is_one_pass_in_order(rows, batch_size, process_count):
    share = {"batch_size": batch_size, "process_count": process_count}
    hosts = [[*eval_batches(rows, process_index=i, **share)] for i in range(process_count)]
    assert {len(batches) for batches in hosts} == {-(NUM_ROWS // -batch_size)}
    found, numbers = [], []
    for parts in zip(*hosts, strict=True):
        for part in parts:
            assert part["input_ids"].shape == (batch_size // process_count, 4)
            is_real = part["segment_ids"][:, 1] > 0
            assert not part["input_ids"][~is_real].any()
            found += np.array(rows_in(part))[is_real].tolist()
            numbers += part["row"].tolist()
    assert found == list(range(NUM_ROWS))
    assert numbers == list(range(len(hosts[0]) * batch_size))
    assert part["row"].dtype == np.int32


def test_batch_size_must_suit_the_hosts(rows):
    with pytest.raises(UserError, match=r"^batch_size: .* 8; .* 3 hosts"):
        train_batch(rows, 0, batch_size=8, seed=0, process_count=3)
    with pytest.raises(UserError, match=r"^batch_size: "):
        next(eval_batches(rows, batch_size=8, process_count=3))
