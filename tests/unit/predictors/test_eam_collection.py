"""Expert activation matrices: counts, the attainable accuracy and k-means, by hand."""

import numpy as np
import pytest

from predictors.eam.collection import attainable_accuracy, choose_representatives, count_rows


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_count_rows__leaves_out_no_choice(num_tokens: int) -> None:
    rows = count_rows(np.tile([2, 4], (num_tokens, 1)), np.zeros(num_tokens, np.int64), 1, 4)
    assert rows.tolist() == [[0, 0, num_tokens, 0]]


def test_attainable__is_the_share_of_the_busiest_experts() -> None:
    counts = np.array([[5.0, 3.0, 2.0], [4.0, 4.0, 2.0]], np.float32)
    # (5 + 3 + 4 + 4) of 20 choices, two experts a layer.
    assert attainable_accuracy(counts, 2) == pytest.approx(0.8)


def test_representatives__are_nearest_to_the_centroids() -> None:
    # Two bundles of directions in one layer; the middle one of each is nearest to its mean.
    angles = np.radians([0, 10, 20, 70, 80, 90])
    matrices = np.stack([np.cos(angles), np.sin(angles)], axis=1)[:, None].astype(np.float32)
    matrices *= np.array([1, 9, 2, 7, 3, 5], np.float32)[:, None, None]
    for seed in range(10):
        assert choose_representatives(matrices, 2, np.random.default_rng(seed)).tolist() == [1, 4]


def test_representatives__of_few_matrices_are_all_and_of_duplicates_fewer_than_clusters() -> None:
    matrices, random = np.ones((9, 2, 2), np.float32), np.random.default_rng(0)
    assert choose_representatives(matrices[:3], 3, random).tolist() == [0, 1, 2]
    assert len(choose_representatives(matrices, 4, random)) >= 1
