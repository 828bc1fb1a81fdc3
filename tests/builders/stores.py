"""An object store on loopback, as s3fs reaches it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest


@contextmanager
def s3_settings(monkeypatch, address: str, *, key="a-key", secret="a-secret") -> Iterator[None]:
    """The environment says where a store is and who asks, to child processes too."""
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'moecast[s3]'")
    place = {"ENDPOINT_URL": address, "DEFAULT_REGION": "us-east-1"}
    keys = {"ACCESS_KEY_ID": key, "SECRET_ACCESS_KEY": secret}
    files = {"CONFIG_FILE": os.devnull, "SHARED_CREDENTIALS_FILE": os.devnull}
    for name, value in (place | keys | files).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


@cache
def start_server() -> str:
    """Address of a store that runs until the process ends: stopping one takes half a second."""
    server = pytest.importorskip("moto.server", reason="moto is not installed")
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    return f"http://{host}:{port}"


@contextmanager
def s3_bucket(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of an empty bucket, which the environment describes."""
    address = start_server()
    import boto3

    bucket = "".join(one for one in name.lower() if one.isalnum())
    with s3_settings(monkeypatch, address):
        boto3.client("s3").create_bucket(Bucket=bucket)
        yield f"s3://{bucket}"
