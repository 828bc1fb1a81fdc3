"""An object store on loopback, as s3fs reaches it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def s3_bucket(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of an empty bucket; the environment says where it is, to child processes too."""
    server = pytest.importorskip("moto.server", reason="moto is not installed")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    import boto3
    import s3fs

    # Its buckets outlive the server.
    bucket = "".join(one for one in name.lower() if one.isalnum())
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    for key, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(key, value)
    s3fs.S3FileSystem.clear_instance_cache()
    boto3.client("s3").create_bucket(Bucket=bucket)
    try:
        yield f"s3://{bucket}"
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        running.stop()
