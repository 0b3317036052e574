"""From `ray up cluster/aws.yaml` to `ray down`, against a mocked AWS on localhost.

moto's server mocks EC2, IAM, S3 and CloudFormation. `ssh` and `rsync` are shims, first in PATH,
that run commands on this machine: no packet is sent to the addresses of mocked instances. The file
is the shipped one, with other ports and folders, and fewer nodes. Ray counts their GPUs, but
training finds none.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import boto3
import pytest
import yaml
from moto.server import ThreadedMotoServer
from ports import free_port
from s3_server import options_at
from tiny_run import TINY

from trishul_ray.sweeps.loading import find_sweeps

#: A table with four runs, instead of vision, which takes a quarter of an hour.
TABLE = os.environ.get("TRISHUL_TEST_TABLE")
SECONDS = 5400 if TABLE else 900
pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 600)]

ROOT = Path(__file__).parents[2]
SHIMS = Path(__file__).parent / "shims"
BIN = Path(sys.executable).parent
BUCKET = "results-of-mine"


@pytest.fixture
def aws(monkeypatch):
    """Start an AWS on localhost in which the stack is deployed; return its address."""
    monkeypatch.setenv("MOTO_IAM_LOAD_MANAGED_POLICIES", "true")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    for name, value in aws_environment(address).items():
        monkeypatch.setenv(name, value)
    image = boto3.client("ec2").describe_images()["Images"][0]["ImageId"]
    boto3.client("ssm").put_parameter(Name="/test/image", Value=image, Type="String")
    template = (ROOT / "cluster" / "aws-account.yaml").read_text(encoding="utf-8")
    parameters = {"BucketName": BUCKET, "SshFrom": "203.0.113.7/32"}
    boto3.client("cloudformation").create_stack(
        StackName="trishul-ray",
        TemplateBody=re.sub("Default: /aws/service/.*", "Default: /test/image", template),
        Capabilities=["CAPABILITY_NAMED_IAM"],
        Parameters=[{"ParameterKey": k, "ParameterValue": v} for k, v in parameters.items()],
    )
    yield address
    server.stop()


def aws_environment(address):
    keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    metadata = {"AWS_EC2_METADATA_DISABLED": "true"}
    return {**keys, **metadata, "AWS_ENDPOINT_URL": address, "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture
def laptop(aws, tmp_path, start, cache):
    """``laptop(words...)`` returns exit code, stdout, stderr of a command on the user's machine."""
    home, nodes = tmp_path / "laptop", tmp_path / "nodes"
    folder = Path("/tmp") / f"up-{os.getpid()}"  # Ray's sockets need a short path
    for each in (home, nodes, folder):
        each.mkdir()
    ports = {"gcs": free_port(), "dashboard": free_port()}
    path = f"{SHIMS}:{BIN}:{os.environ['PATH']}"
    bashrc = [
        f'export PATH="{path}"',
        f'export PYTHONPATH="{ROOT}"',
        f'export TRISHUL_CACHE="{cache}"',
    ]
    versions = f"{ROOT / 'pyproject.toml'}:{ROOT / 'constraints.txt'}"
    environment = {
        "HOME": str(home), "PATH": path, **aws_environment(aws), "MLFLOW_TRACKING_URI": "",
        "TEST_NODES": str(nodes), "TEST_DASHBOARD_PORT": str(ports["dashboard"]),
        "TEST_BASHRC": "\n".join([*bashrc, ""]), "TEST_VENV": sys.prefix, "TEST_VERSIONS": versions,
        "RAY_UP_enable_autoscaler_v2": "1", "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    subprocess.run(["bash", ROOT / "cluster" / "make-secrets.sh"], env=environment, check=True)
    write_config(tmp_path / "aws.yaml", ports, folder)

    def run(*words, cwd=ROOT, seconds=SECONDS):
        return start(*words, cwd=cwd, **environment).end(seconds)

    yield run
    for node in nodes.iterdir():
        if node.is_dir():
            words = [str(SHIMS / "ssh"), f"ubuntu@{node.name}", "ray stop"]
            subprocess.run(words, env=environment, check=True)
    shutil.rmtree(folder, ignore_errors=True)


def write_config(path, ports, folder):
    """Write cluster/aws.yaml with the changes for nodes on one machine."""
    text = (ROOT / "cluster" / "aws.yaml").read_text(encoding="utf-8")
    text = text.replace("s3://CHANGE-ME", f"s3://{BUCKET}").replace("6379", str(ports["gcs"]))
    config = yaml.safe_load(text)
    config["max_workers"] = 3
    head, worker = config["head_start_ray_commands"], config["worker_start_ray_commands"]
    agents = ["--dashboard-agent-listen-port=0", "--metrics-export-port=0"]
    # Nodes must not share a folder: one would delete the working directory of the other.
    more = [f"--temp-dir={folder}/head", f"--dashboard-port={ports['dashboard']}", *agents]
    # Disable MLflow and the watcher, which would query the metadata of this machine's network.
    config["head_start_ray_commands"] = [f"{head[1]} {' '.join(more)}"]
    config["worker_start_ray_commands"] = [
        f"{worker[1]} --temp-dir={folder}/$TEST_NODE {' '.join(agents)}"
    ]
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def instances(*states):
    found = boto3.client("ec2").describe_instances()["Reservations"]
    every = [each for reservation in found for each in reservation["Instances"]]
    return [each for each in every if not states or each["State"]["Name"] in states]


def node_type(instance):
    return {tag["Key"]: tag["Value"] for tag in instance["Tags"]}["ray-user-node-type"]


def test_from_ray_up_to_ray_down(laptop, tmp_path):
    file = tmp_path / "aws.yaml"
    ray = BIN / "ray"
    code, out, errors = laptop(ray, "up", "--yes", file)
    assert code == 0, out + errors
    (head,) = instances("running")
    assert (node_type(head), head["InstanceType"]) == ("head", "m7i.large")
    assert head["IamInstanceProfile"]["Arn"].endswith("/trishul-ray-head")
    assert "InstanceLifecycle" not in head
    check_firewall(head)

    trishul = [sys.executable, "-m", "trishul_ray.cli"]
    place = boto_place(f"s3://{BUCKET}/runs")
    project = tmp_path / "project"
    project.mkdir()
    (project / "mine.yaml").write_text("axes: {method: [trishul, fedit], seed: [0, 1]}\n")
    words, cells = ["sweep", "mine.yaml", *TINY], 4
    if TABLE:
        words = ["table", TABLE, "--profile", "smoke", "tracking.mlflow=false"]
        (sweep,) = find_sweeps([TABLE], "smoke", [])
        cells = len(sweep.cells)
    job = ["--cluster", file, "--runs", place, "--working-dir", project, "--"]
    code, out, errors = laptop(*trishul, "submit", *job, *words, "--report", tmp_path / "report")
    assert code == 0, out + errors
    stored = boto3.client("s3").get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    names = [each["Key"] for page in stored for each in page["Contents"]]
    results = [name for name in names if name.endswith("/result.json")]
    assert len(results) == cells and all(name.startswith("runs/") for name in names)
    assert (tmp_path / "report" / "report.html").exists()

    workers = [each for each in instances() if node_type(each) != "head"]
    assert workers
    for each in workers:
        assert each["IamInstanceProfile"]["Arn"].endswith("/trishul-ray-worker")
        assert (each.get("InstanceLifecycle") == "spot") == node_type(each).startswith("spot")
        check_firewall(each)
    # The driver was neither on the head nor on a machine that EC2 may preempt.
    types = [node_type(each) for each in workers]
    assert types.count("driver") == 1
    assert set(types) <= {"driver", "spot-g6-2xlarge"} and len(types) <= 3

    code, out, errors = laptop(ray, "down", "--yes", file)
    assert code == 0, out + errors
    assert instances("pending", "running", "stopping", "stopped") == []
    secrets = [tmp_path / "laptop" / name for name in (".ray/auth_token", ".mlflow/credentials")]
    log = (tmp_path / "nodes" / "ssh.log").read_text()
    assert all(path.read_text().split()[-1] not in log for path in secrets)


def check_firewall(instance):
    """Check that the instance has our security group, with SSH only from one range."""
    (group,) = instance["SecurityGroups"]
    assert group["GroupName"] == "trishul-ray"
    ids = [group["GroupId"]]
    (rules,) = boto3.client("ec2").describe_security_groups(GroupIds=ids)["SecurityGroups"]
    ranges = {each["CidrIp"] for rule in rules["IpPermissions"] for each in rule["IpRanges"]}
    assert ranges == {"203.0.113.7/32"}
    assert all(rule.get("Ipv6Ranges") == [] for rule in rules["IpPermissions"])


def boto_place(uri):
    """Return a URI of the mocked S3 for pyarrow, which would query the region elsewhere."""
    address = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    return f"{uri}?{options_at(address)}"
