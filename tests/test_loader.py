import time

import numpy as np
import pytest

from electra_jax.data.layout import Rows
from electra_jax.data.loader import eval_batches, train_batch, train_batches
from electra_jax.data.store import Tokens
from electra_jax.errors import UserError

NUM_ROWS = 50


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Rows of one piece with one token, whose id tells the row."""
    return Rows(
        length=4,
        tokens=Tokens([np.arange(100, 100 + NUM_ROWS, dtype=np.uint16)]),
        starts=np.arange(NUM_ROWS),
        sizes=np.ones(NUM_ROWS, np.int32),
        first=np.arange(NUM_ROWS + 1),
        pad_id=0,
        cls_id=2,
        sep_id=3,
    )


def rows_in(batch: dict[str, np.ndarray]) -> list[int]:
    return (batch["input_ids"][:, 1] - 100).tolist()


def visited(rows: Rows, num_rows: int, *, batch_size: int, seed: int) -> list[int]:
    steps = -(num_rows // -batch_size)
    batches = (train_batch(rows, step, batch_size=batch_size, seed=seed) for step in range(steps))
    return [row for batch in batches for row in rows_in(batch)][:num_rows]


def test_each_epoch_visits_every_row_once_in_another_order(rows):
    # 12 does not divide 50, so batches straddle epochs.
    order = np.reshape(visited(rows, 5 * NUM_ROWS, batch_size=12, seed=0), (5, NUM_ROWS))
    np.testing.assert_array_equal(np.sort(order), np.tile(np.arange(NUM_ROWS), (5, 1)))
    assert len(np.unique(order, axis=0)) == 5


def test_order_depends_on_the_seed_and_not_on_the_batch_size(rows):
    order = visited(rows, 3 * NUM_ROWS, batch_size=12, seed=0)
    assert visited(rows, 3 * NUM_ROWS, batch_size=75, seed=0) == order
    other = visited(rows, 3 * NUM_ROWS, batch_size=12, seed=1)
    # Nor is the next seed the same sequence of epochs, begun one later.
    assert other[:NUM_ROWS] not in (order[:NUM_ROWS], order[NUM_ROWS : 2 * NUM_ROWS])


@pytest.mark.parametrize("process_count", [1, 2, 4])
def test_hosts_together_hold_the_global_batch(rows, process_count):
    whole = train_batch(rows, 7, batch_size=8, seed=0)
    parts = [
        train_batch(rows, 7, batch_size=8, seed=0, process_index=index, process_count=process_count)
        for index in range(process_count)
    ]
    for key, array in whole.items():
        np.testing.assert_array_equal(np.concatenate([part[key] for part in parts]), array)
    assert whole["row"].tolist() == list(range(8))
    assert whole["row"].dtype == np.int32


def test_any_step_is_instant(rows):
    started = time.monotonic()
    train_batch(rows, 1_000_000, batch_size=8, seed=0)
    next(train_batches(rows, 1_000_000, 10_000_000, batch_size=8, seed=0))
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_prefetched_batches_are_the_same_in_the_same_order(rows, num_threads):
    share = {"batch_size": 8, "seed": 3, "process_index": 1, "process_count": 2}
    batches = list(train_batches(rows, 20, 30, **share, num_threads=num_threads, prefetch=4))
    assert len(batches) == 30
    for step, batch in enumerate(batches, start=20):
        for key, array in train_batch(rows, step, **share).items():
            np.testing.assert_array_equal(batch[key], array)


@pytest.mark.parametrize("process_count", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [8, 20, 100])
def test_evaluation_is_one_pass_in_order(rows, batch_size, process_count):
    hosts = [
        eval_batches(rows, batch_size=batch_size, process_index=index, process_count=process_count)
        for index in range(process_count)
    ]
    assert {len(batches) for batches in hosts} == {-(NUM_ROWS // -batch_size)}
    found, numbers = [], []
    for parts in zip(*hosts, strict=True):
        for part in parts:
            assert part["input_ids"].shape == (batch_size // process_count, 4)
            is_real = part["piece_ids"][:, 1] > 0
            assert not part["input_ids"][~is_real].any()
            found += np.array(rows_in(part))[is_real].tolist()
            numbers += part["row"].tolist()
    assert found == list(range(NUM_ROWS))
    assert numbers == list(range(len(hosts[0]) * batch_size))
    assert part["row"].dtype == np.int32


def test_evaluation_can_be_repeated(rows):
    batches = eval_batches(rows, batch_size=20)
    first, second = ([rows_in(batch) for batch in batches] for _ in range(2))
    assert first == second


def test_batch_size_must_suit_the_hosts(rows):
    message = r"^batch_size: found 8; allowed are multiples of the 3 hosts$"
    with pytest.raises(UserError, match=message):
        train_batch(rows, 0, batch_size=8, seed=0, process_count=3)
    with pytest.raises(UserError, match=message):
        eval_batches(rows, batch_size=8, process_count=3)[0]
