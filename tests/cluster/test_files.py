"""The files of cluster/ are valid according to their readers' schemas, and secure as documented.

The schemas of Kubernetes validate pods, policies and accounts. These tests start no cluster.
"""

import configparser
import json
import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import boto3
import jsonschema
import kubernetes_validate
import pytest
import ray
import yaml
from moto import mock_aws
from ray.autoscaler._private.local.config import prepare_local

from trishul_ray.storage.redaction import redact

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
PYTHON = Path(sys.executable)
#: The oldest Kubernetes that is still maintained at the time of KubeRay 1.6.
KUBERNETES = "1.32"


def load(name):
    return yaml.safe_load((CLUSTER / name).read_text(encoding="utf-8"))


def all_files():
    return [path for path in CLUSTER.rglob("*") if path.is_file() and path.suffix != ".pyc"]


# The file of `ray up`.


@pytest.mark.parametrize("name", ["aws.yaml", "onprem.yaml"])
def test_ray_accepts_the_file(name):
    schema = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"
    config = load(name)
    prepared = prepare_local(config)[0] if name == "onprem.yaml" else config
    jsonschema.validate(prepared, json.loads(schema.read_text()))
    assert config["cluster_name"] == "trishul-ray"
    # Files to copy to the nodes are in this project, or in the user's home.
    for remote, local in config["file_mounts"].items():
        assert remote.startswith("~/")
        assert local.startswith("~/") or (ROOT / local).exists()
    mounted = {Path(local).name for local in config["file_mounts"].values()}
    assert mounted >= {"trishul_ray", "sweeps", "cluster", "pyproject.toml", "constraints.txt"}
    assert not mounted & {".git", "runs", ".venv", "data"}


AWS = load("aws.yaml")
NODES = AWS["available_node_types"]


def test_head_node_is_idle_and_on_demand():
    head = NODES[AWS["head_node_type"]]
    assert head["resources"] == {"CPU": 0}
    assert "InstanceMarketOptions" not in head["node_config"]
    assert "--num-cpus=0" in " ".join(load("onprem.yaml")["head_start_ray_commands"])


def test_gpu_workers_use_spot_with_on_demand_alternative():
    workers = {name: each for name, each in NODES.items() if "GPU" in each["resources"]}
    market = {n: each["node_config"]["InstanceMarketOptions"] for n, each in workers.items()}
    spot = {n: each for n, each in workers.items() if market[n] == {"MarketType": "spot"}}
    assert len({each["node_config"]["InstanceType"] for each in spot.values()}) >= 3
    # Use one kind of GPU, because results depend on it.
    families = {each["node_config"]["InstanceType"].split(".")[0] for each in workers.values()}
    assert len(families) == 1
    assert len(workers) == len(spot) + 1
    assert all(each["min_workers"] == 0 for each in workers.values())
    # Ray prefers the highest priority: the cheapest type is first.
    order = sorted(workers, key=lambda name: -workers[name]["priority"])
    assert [name in spot for name in order] == [True] * len(spot) + [False]
    for name, each in NODES.items():
        market = "spot" if name in spot else "on-demand"
        assert each.get("labels", {}).get("ray.io/market-type", "on-demand") == market


def test_nodes_use_account_rights_and_firewall():
    for name, each in NODES.items():
        node = each["node_config"]
        profile = "trishul-ray-head" if name == "head" else "trishul-ray-worker"
        assert node["IamInstanceProfile"] == {"Name": profile}
        # Without the template, Ray would create a group that opens port 22 to the world.
        assert node["LaunchTemplate"]["LaunchTemplateName"] == "trishul-ray"
        assert not {"SecurityGroupIds", "ImageId", "KeyName"} & node.keys()
        assert node["MetadataOptions"]["HttpTokens"] == "required"
    assert not {"security_group", "aws_credentials"} & AWS["provider"].keys()


@pytest.mark.parametrize("name", ["aws.yaml", "onprem.yaml"])
def test_the_dashboard_listens_on_localhost(name):
    assert "--dashboard-host=127.0.0.1" in " ".join(load(name)["head_start_ray_commands"])


def test_node_shells_have_token_mode_and_versions():
    script = (CLUSTER / "setup-node.sh").read_text()
    assert "export RAY_AUTH_MODE=token" in script
    assert "export RAY_ENABLE_UV_RUN_RUNTIME_ENV=0" in script
    assert "--constraint" in script and "constraints.txt" in script


# Secrets.


def test_no_file_holds_a_secret():
    assert all_files()
    for path in [*all_files(), ROOT / ".dockerignore"]:
        text = path.read_text(encoding="utf-8")
        assert redact(text) == text, path
        assert not re.search(r"AKIA|BEGIN [A-Z ]*PRIVATE KEY|[0-9a-f]{40}", text), path


def test_secrets_are_created_once_and_private(tmp_path):
    def make():
        command = ["bash", str(CLUSTER / "make-secrets.sh")]
        path = f"{PYTHON.parent}:{os.environ['PATH']}"
        env = {"HOME": str(tmp_path), "PATH": path}
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout

    said = make()
    files = [tmp_path / ".ray" / "auth_token", tmp_path / ".mlflow" / "credentials"]
    before = [path.read_text() for path in files]
    assert re.fullmatch("[0-9a-f]{64}", before[0])
    parser = configparser.ConfigParser()
    parser.read(files[1])
    assert len(parser["mlflow"]["mlflow_tracking_password"]) >= 24
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    assert before[0] not in said and parser["mlflow"]["mlflow_tracking_password"] not in said
    assert make() == ""
    assert [path.read_text() for path in files] == before


def test_node_without_bucket_is_rejected(tmp_path):
    for name in ("aws.yaml", "onprem.yaml"):
        (command,) = load(name)["setup_commands"]
        place = command.split()[-1]
        words = ["bash", str(CLUSTER / "setup-node.sh"), place]
        run = subprocess.run(words, env={"HOME": str(tmp_path)}, capture_output=True, text=True)
        assert run.returncode == 2
        assert "replace CHANGE-ME with the name of your bucket" in run.stderr
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("driver", "rejected"), [("535.129.03", True), ("580.65.06", False)])
def test_node_with_old_driver_is_rejected(tmp_path, driver, rejected):
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\necho {driver}\n")
    command.chmod(0o755)
    (tmp_path / "home").mkdir()
    words = ["bash", str(CLUSTER / "setup-node.sh"), "s3://mine"]
    env = {"HOME": str(tmp_path / "home"), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = subprocess.run(words, env=env, capture_output=True, text=True)
    # Without secrets, the set-up of the other service would end later.
    assert run.returncode == (2 if rejected else 1)
    assert (f"driver of this node is {driver}" in run.stderr) is rejected
    assert bool(list((tmp_path / "home").iterdir())) is not rejected


# The AWS account.


def lint(*words):
    run = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_linters_accept_template_and_image():
    lint(PYTHON.with_name("cfn-lint"), CLUSTER / "aws-account.yaml")
    lint(PYTHON.with_name("hadolint"), CLUSTER / "Dockerfile")


@pytest.fixture
def account(monkeypatch):
    """Deploy the stack in a mocked account, without a network."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        session = boto3.Session(region_name="us-east-1")
        images = session.client("ec2").describe_images()["Images"]
        image = {"Name": "/test/image", "Value": images[0]["ImageId"], "Type": "String"}
        session.client("ssm").put_parameter(**image)
        parameters = {"BucketName": "results-of-mine", "SshFrom": "203.0.113.7/32"}
        # Only AWS itself may write below /aws.
        template = (CLUSTER / "aws-account.yaml").read_text(encoding="utf-8")
        image_of_aws = r"Default: /aws/service/deeplearning/.*"
        template = re.sub(image_of_aws, "Default: /test/image", template)
        session.client("cloudformation").create_stack(
            StackName="trishul-ray", TemplateBody=template, Capabilities=["CAPABILITY_NAMED_IAM"],
            Parameters=[{"ParameterKey": k, "ParameterValue": v} for k, v in parameters.items()],
        )  # fmt: skip
        yield session


def statements(session, role):
    """Yield the statements of all policies of a role."""
    iam = session.client("iam")
    for attached in iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"]:
        arn = attached["PolicyArn"]
        version = iam.get_policy(PolicyArn=arn)["Policy"]["DefaultVersionId"]
        policy = iam.get_policy_version(PolicyArn=arn, VersionId=version)["PolicyVersion"]
        yield from policy["Document"]["Statement"]
    for name in iam.list_role_policies(RoleName=role)["PolicyNames"]:
        document = iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"]
        # moto returns text
        document = yaml.safe_load(document) if isinstance(document, str) else document
        yield from document["Statement"]


def listed(value):
    return [value] if isinstance(value, str) else value


def test_nodes_reach_one_bucket(account):
    bucket = "arn:aws:s3:::results-of-mine"
    for role in ("trishul-ray-worker", "trishul-ray-head"):
        found = list(statements(account, role))
        assert found
        for statement in found:
            actions = listed(statement["Action"])
            assert statement["Effect"] == "Allow" and not any("*" in action for action in actions)
            if any(action.startswith("s3:") for action in actions):
                assert all(action.startswith("s3:") for action in actions)
                assert set(listed(statement["Resource"])) <= {bucket, f"{bucket}/*"}
    # A worker has no other permission.
    for statement in statements(account, "trishul-ray-worker"):
        assert all(action.startswith("s3:") for action in listed(statement["Action"]))


def test_head_ends_only_its_nodes(account):
    worker = account.client("iam").get_role(RoleName="trishul-ray-worker")["Role"]["Arn"]
    by_action = {}
    for statement in statements(account, "trishul-ray-head"):
        for action in listed(statement["Action"]):
            by_action.setdefault(action, []).append(statement)
    # It starts only instances with the cluster's tag, of the types in our file, from the template,
    # and thus behind its firewall.
    for statement in by_action["ec2:RunInstances"]:
        assert "*" not in listed(statement["Resource"])
        kinds = {arn.split(":")[5].partition("/")[0] for arn in listed(statement["Resource"])}
        open_ended = {arn for arn in listed(statement["Resource"]) if arn.endswith("/*")}
        assert not {"image", "security-group", "launch-template"} & {
            arn.split(":")[5].partition("/")[0] for arn in open_ended
        }
        if "instance" in kinds:
            condition, asked = statement["Condition"], kinds
    assert asked == {"instance"}
    assert condition["StringEquals"] == {"aws:RequestTag/ray-cluster-name": AWS["cluster_name"]}
    assert condition["ArnEquals"]["ec2:LaunchTemplate"].split("/")[-1].startswith("lt-")
    workers = [kind for name, kind in NODES.items() if name != "head"]
    types = {kind["node_config"]["InstanceType"] for kind in workers}
    assert set(condition["StringLike"]["ec2:InstanceType"]) == types
    (passes,) = by_action["iam:PassRole"]
    assert listed(passes["Resource"]) == [worker]
    (ends,) = by_action["ec2:TerminateInstances"]
    tag = {"aws:ResourceTag/ray-cluster-name": AWS["cluster_name"]}
    assert ends["Condition"] == {"StringEquals": tag}
    assert all("Condition" in statement for statement in by_action["ec2:CreateTags"])


def test_only_ssh_from_one_range_comes_in(account):
    ec2 = account.client("ec2")
    template = ec2.describe_launch_template_versions(LaunchTemplateName="trishul-ray")
    data = template["LaunchTemplateVersions"][0]["LaunchTemplateData"]
    assert data["ImageId"].startswith("ami-")
    (group,) = ec2.describe_security_groups(GroupIds=data["SecurityGroupIds"])["SecurityGroups"]
    inside, ssh = sorted(group["IpPermissions"], key=lambda rule: rule["IpProtocol"])
    assert [pair["GroupId"] for pair in inside["UserIdGroupPairs"]] == [group["GroupId"]]
    assert (inside["IpProtocol"], inside["IpRanges"], inside["Ipv6Ranges"]) == ("-1", [], [])
    assert (ssh["IpProtocol"], ssh["FromPort"], ssh["ToPort"]) == ("tcp", 22, 22)
    assert [each["CidrIp"] for each in ssh["IpRanges"]] == ["203.0.113.7/32"]
    assert not ssh["Ipv6Ranges"] and not ssh["UserIdGroupPairs"]


@pytest.mark.parametrize("place", ["0.0.0.0/0", "203.0.113.7", "203.0.0.0/8", "::/0"])
def test_ssh_from_everywhere_is_rejected(place):
    text = (CLUSTER / "aws-account.yaml").read_text(encoding="utf-8")
    (pattern,) = re.findall(r"AllowedPattern: (.*)", text)
    assert re.fullmatch(pattern, "203.0.113.7/32") and not re.fullmatch(pattern, place)


# Kubernetes.

DOCUMENTS = [
    document
    for name in ("kuberay.yaml", "rayjob.yaml")
    for document in yaml.safe_load_all((CLUSTER / name).read_text(encoding="utf-8"))
]
KINDS = {document["kind"]: document for document in DOCUMENTS}
CLUSTERS = [KINDS["RayCluster"]["spec"], KINDS["RayJob"]["spec"]["rayClusterSpec"]]


def templates_of(cluster):
    return [each["template"] for each in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document["kind"])
def test_kubernetes_accepts_the_document(document):
    if document["apiVersion"] != "ray.io/v1":
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return
    cluster = document["spec"].get("rayClusterSpec", document["spec"])
    assert cluster["rayVersion"] == ray.__version__
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for template in templates_of(cluster):
        pod = template["spec"]
        as_pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}
        kubernetes_validate.validate(as_pod, KUBERNETES, strict=True)
        assert pod["securityContext"]["runAsNonRoot"] is True
        mounted = {each["name"] for each in pod["volumes"]}
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert {each["name"] for each in container["volumeMounts"]} <= mounted
    gpu = cluster["workerGroupSpecs"][-1]
    assert (gpu["groupName"], gpu["minReplicas"]) == ("gpu", 0)


def test_policy_covers_pods_of_its_namespace():
    policy = KINDS["NetworkPolicy"]["spec"]
    label = policy["podSelector"]["matchLabels"].items()
    templates = [template for cluster in CLUSTERS for template in templates_of(cluster)]
    templates.append(KINDS["RayJob"]["spec"]["submitterPodTemplate"])  # it also queries the head
    assert len(templates) == 7
    assert all(label <= template["metadata"]["labels"].items() for template in templates)
    (rule,) = policy["ingress"]
    assert {"podSelector": policy["podSelector"]} in rule["from"]
    assert all("namespaceSelector" not in peer for peer in rule["from"])


def test_image_runs_unprivileged_with_its_files():
    lines = (CLUSTER / "Dockerfile").read_text(encoding="utf-8").splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users == ["1000"]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    copied = {word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)
    assert any("--constraint constraints.txt" in line for line in lines)


@pytest.mark.parametrize("name", ["Dockerfile", "setup-node.sh"])
def test_nodes_install_all_extras(name):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extras,) = re.findall(r"\[([\w,]+)\]\"$", (CLUSTER / name).read_text(), re.MULTILINE)
    # The harness of `eval` is for finished runs.
    assert {*extras.split(",")} == project["optional-dependencies"].keys() - {"dev", "docs", "eval"}
