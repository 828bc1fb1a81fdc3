"""Options of `serve` that exclude each other or are out of range."""

import pytest

from predictors.errors import MoecastError
from runtime.serving.config import ServeConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_body": "0"}, "max_body=0: must be at least 1 byte"),
        ({"replicas": 2}, "launcher=ray"),
        ({"ray_address": "10.0.0.1:6379"}, "launcher=ray"),
        ({"launcher": "slurm"}, "unknown launcher"),
        ({"max_replicas": 2}, "max_replicas=2: .*launcher=ray"),
        ({"launcher": "ray", "replicas": 0}, "replicas=0"),
        ({"launcher": "ray", "replicas": 3, "max_replicas": 2}, "max_replicas=2: .*at least 3"),
        ({"launcher": "ray", "replica_cpus": 0}, "replica_cpus=0"),
        ({"launcher": "ray", "replica_gpus": -1}, "replica_gpus=-1: must be at least 0"),
        ({"replica_gpus": 1}, "replica_gpus=1: .*launcher=ray"),
        ({"launcher": "ray", "scale_down_seconds": -1.0}, "scale_down_seconds=-1"),
        ({"launcher": "ray", "port": 0, "budget": "50%"}, "port=0"),
        ({"launcher": "ray"}, "budget=auto: with launcher=ray.*budget=4GiB"),
    ],
)
def test_serve_config__rejects_invalid_options(options, message):
    with pytest.raises(MoecastError, match=message):
        ServeConfig(**options)


def test_serve_config__accepts_replicas_with_ray():
    config = ServeConfig(launcher="ray", replicas=2, budget="50%")
    assert (config.replicas, config.most_replicas) == (2, 2)
    assert ServeConfig(launcher="ray", max_replicas=3, budget="50%").most_replicas == 3
