"""The examples of docs/hosts, started by the real cluster software where it is installed.

Where it is not, the same command runs over two hosts in the environment that the software would have made for it, and
the test says so.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hosts import Hosts
from one_layer import write_one_layer
from slurm import installed, slurm, submit

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "docs" / "hosts"
JAXCOLL = [sys.executable, "-m", "models.cli"]
MEASURE = ["bench-collectives", "--devices", "4", "--sizes", "4096,8192", "--rounds", "1", "--json"]
CLUSTER_PORT = 61500  # JAX takes 61440 + a job's number


def environment() -> dict[str, str]:
    """This process's, without what it knows of tests."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "SLURM_", "OMPI_"))}
    quick = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    patient = {"JAXCOLL_START_TIMEOUT": "90"}  # a loaded machine imports slowly
    return kept | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | quick | patient


@pytest.fixture
def say(capsys) -> Callable[[str], None]:
    """Prints a line that is seen in every run."""

    def told(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}", flush=True)

    return told


def over_hosts(words: list[str], names: list[str], variables: Callable[[int], dict[str, str]]) -> dict[str, Any]:
    """Runs a command in a process on each host, with what a cluster would set; the JSON that process 0 prints."""
    with Hosts(len(names), names=names) as hosts:
        job = [hosts.start(rank, words, environment() | variables(rank)) for rank in range(len(names))]
        said = [process.communicate(timeout=200) for process in job]
        assert [process.returncode for process in job] == [0] * len(names), said
        assert all(out == "" for out, _ in said[1:])
    return json.loads(said[0][0])


def assert_two_processes(result: dict[str, Any]) -> None:
    assert (result["topology"]["processes"], result["topology"]["local_devices"]) == (2, 2)


def open_mpi(rank: int) -> dict[str, str]:
    """What Open MPI 4 sets, as far as JAX reads it (jax/_src/clusters/ompi_cluster.py)."""
    return {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_MCA_orte_hnp_uri": f"{(CLUSTER_PORT - 61440) * 4096}.0;tcp://{Hosts.address(0)}:40001",
    }


@pytest.mark.slow
def test_mpirun(say, tmp_path):
    verify = ["verify", str(write_one_layer(tmp_path)), "--attn-dp", "2", "--attn-tp", "2", "--json"]
    if shutil.which("mpirun"):
        # On a machine that is all of the cluster: as root, and with more processes than cores.
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        more = environment() | allowed | {"OMPI_MCA_rmaps_base_oversubscribe": "1"}
        words = [str(EXAMPLES / "mpirun.sh"), "2", *JAXCOLL, *verify]
        done = subprocess.run(words, env=more, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
    else:
        say("mpirun is not installed (openmpi-bin): its environment is generated, over two hosts")
        result = over_hosts([*JAXCOLL, *verify], ["host0", "host1"], open_mpi)
    assert result["ok"] is True and result["greedy_match"] is True
    assert_two_processes(result)


@pytest.mark.parametrize(
    ("words", "path", "needed"),
    [
        ([], os.environ["PATH"], "usage: [HOSTS=first:1,second:1] mpirun.sh PROCESSES COMMAND..."),
        (["two", "true"], os.environ["PATH"], "usage: "),
        (["2", "true"], "", "mpirun.sh: mpirun is not installed (Debian and Ubuntu: apt-get install openmpi-bin)"),
    ],
)
def test_mpirun_sh_says_what_is_wrong(words, path, needed):
    bash = shutil.which("bash")
    assert bash
    done = subprocess.run([bash, EXAMPLES / "mpirun.sh", *words], env={"PATH": path}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(needed) and done.stderr.count("\n") == 1


def slurm_step(rank: int) -> dict[str, str]:
    """What Slurm sets for a task on two nodes, as far as JAX reads it (jax/_src/clusters/slurm_cluster.py)."""
    return {
        "SLURM_JOB_ID": str(CLUSTER_PORT - 61440),
        "SLURM_STEP_NODELIST": "node[0-1]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
    }


@pytest.mark.slow
def test_slurm(say, tmp_path):
    if installed():
        with slurm(tmp_path) as cluster:
            more = environment() | {"SLURM_CONF": cluster["SLURM_CONF"]}
            options = ["--nodes=1", "--ntasks-per-node=2"]
            code = submit([*options, str(EXAMPLES / "slurm.sbatch"), *JAXCOLL, *MEASURE], tmp_path, more, 200)
            (out,), (err,) = tmp_path.glob("jaxcoll-*.out"), tmp_path.glob("jaxcoll-*.err")
            assert code == 0, err.read_text()
            result = json.loads(out.read_text())
    else:
        say("Slurm is not installed, or we are not root: its environment is generated, over two hosts")
        result = over_hosts([*JAXCOLL, *MEASURE], ["node0", "node1"], slurm_step)
    assert len(result["measurements"]) == 4
    assert_two_processes(result)


# What a JobSet may hold, as far as the example uses it; any other field is refused. From the public API references of
# JobSet v1alpha2 (jobset.sigs.k8s.io) and of Kubernetes v1 and batch/v1 (kubernetes.io/docs/reference). A trailing
# "!" is a required field, a set the allowed values.
QUANTITIES = {"cpu": str, "memory": str, "nvidia.com/gpu": str}
VARIABLE = {"name!": str, "value": str, "valueFrom": {"fieldRef!": {"fieldPath!": str}}}
CONTAINER = {
    "name!": str, "image": str, "command": [str], "env": [VARIABLE], "ports": [{"containerPort!": int}],
    "resources": {"requests": QUANTITIES, "limits": QUANTITIES},
}  # fmt: skip
POD = {"restartPolicy": {"Never", "OnFailure"}, "terminationGracePeriodSeconds": int, "containers!": [CONTAINER]}
JOB = {
    "completionMode": {"Indexed", "NonIndexed"}, "parallelism": int, "completions": int, "backoffLimit": int,
    "template!": {"spec!": POD},
}  # fmt: skip
JOB_SET = {
    "apiVersion!": {"jobset.x-k8s.io/v1alpha2"},
    "kind!": {"JobSet"},
    "metadata!": {"name!": str},
    "spec!": {
        "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool, "subdomain": str},
        "failurePolicy": {"maxRestarts": int},
        "replicatedJobs": [{"name!": str, "replicas": int, "template!": {"spec!": JOB}}],
    },
}


def faults(value: Any, schema: Any, where: str = "") -> list[str]:
    """What in `value` the schema does not allow."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [f"{where} must be an object"]
        fields = {name.rstrip("!"): part for name, part in schema.items()}
        missing = [f"{where}.{n[:-1]} is missing" for n in schema if n.endswith("!") and n[:-1] not in value]
        unknown = [f"{where}.{name} is unknown" for name in value if name not in fields]
        known = [(name, part) for name, part in value.items() if name in fields]
        return missing + unknown + [f for name, part in known for f in faults(part, fields[name], f"{where}.{name}")]
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [f"{where} must be a list"]
        return [f for i, part in enumerate(value) for f in faults(part, schema[0], f"{where}[{i}]")]
    if isinstance(schema, set):
        return [] if value in schema else [f"{where} must be one of {sorted(schema)}"]
    return [] if type(value) is schema else [f"{where} must be {schema.__name__}"]


def manifest() -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / "jobset.yaml").read_text())


def test_the_manifest_follows_the_schema():
    assert faults(manifest(), JOB_SET) == []
    job = manifest()["spec"]["replicatedJobs"][0]
    assert re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", job["name"])
    broken = manifest()
    broken["kind"], broken["spec"]["suspendd"] = "Jobset", True
    broken["spec"]["replicatedJobs"][0]["replicas"] = "1"
    del broken["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["name"]
    assert faults(broken, JOB_SET) == [
        ".kind must be one of ['JobSet']",
        ".spec.suspendd is unknown",
        ".spec.replicatedJobs[0].replicas must be int",
        ".spec.replicatedJobs[0].template.spec.template.spec.containers[0].name is missing",
    ]


@pytest.mark.slow
def test_the_manifests_pods_make_one_job(say):
    """Each pod is a host with the name that JobSet gives it; command and environment are the manifest's."""
    found = manifest()
    name, (replicated,) = found["metadata"]["name"], found["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert (
        job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"] and replicated["replicas"] == 1
    )
    names = [f"{name}-{replicated['name']}-0-{pod}.{name}" for pod in range(job["parallelism"])]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

    def variables(pod: int) -> dict[str, str]:
        told = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}  # every pod has it; JAX must not be led to ask the cluster
        for variable in container["env"]:
            source = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            assert source in (None, index)
            told[variable["name"]] = str(pod) if source else variable["value"]
        return told

    program, *words = container["command"]
    assert program == "jaxcoll"
    say("there is no Kubernetes here: the manifest's pods run as hosts in namespaces")
    result = over_hosts([*JAXCOLL, *words, "--sizes", "4096,8192", "--rounds", "1"], names, variables)
    assert (result["topology"]["processes"], result["topology"]["local_devices"]) == (2, 1)


def test_every_example_has_a_page_that_names_it():
    files = {path.name for path in EXAMPLES.iterdir()}
    assert files == {"mpirun.md", "mpirun.sh", "slurm.md", "slurm.sbatch", "jobset.md", "jobset.yaml"}
    for page, example in (("mpirun.md", "mpirun.sh"), ("slurm.md", "slurm.sbatch"), ("jobset.md", "jobset.yaml")):
        assert f"docs/hosts/{example}" in (EXAMPLES / page).read_text()
