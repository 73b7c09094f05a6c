"""The launch files that no test runs: read, and held against what JAX asks of its surroundings."""

import inspect
import re
import subprocess

import yaml
from engine_processes import ROOT
from jax._src import clusters
from jax._src.clusters import cloud_tpu_cluster, k8s_cluster

CLUSTER = ROOT / "examples/cluster"


def test_the_jobset_has_what_jax_asks_kubernetes_for():
    jobset, account, role, binding = yaml.safe_load_all((CLUSTER / "jobset.yaml").read_text())
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    assert job["parallelism"] == job["completions"]
    assert (job["completionMode"], job["backoffLimit"]) == ("Indexed", 0)
    assert pod["restartPolicy"] == "Never"
    assert pod["containers"][0]["command"][:2] == ["python", "train.py"]
    assert [rule["onExitCodes"]["values"] for rule in job["podFailurePolicy"]["rules"]] == [[83]]

    # What JAX reads there, its role may read.
    source = inspect.getsource(k8s_cluster)
    asked = set(re.findall(r"(?:list|read)_namespaced_(\w+)", source))
    granted = {name for rule in role["rules"] for name in rule["resources"]}
    assert {f"{name}s" for name in asked} == granted
    assert all(rule["verbs"] == ["get", "list"] for rule in role["rules"])
    names = {
        account["metadata"]["name"],
        binding["subjects"][0]["name"],
        binding["roleRef"]["name"],
    }
    assert names == {pod["serviceAccountName"]} == {role["metadata"]["name"]}


def test_tpu_hosts_find_each_other_by_the_variables_of_the_page(monkeypatch):
    found = cloud_tpu_cluster.GkeTpuCluster
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    for key, value in {
        "TPU_WORKER_HOSTNAMES": "localhost,b",
        "TPU_WORKER_ID": "1",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "localhost:8080",
    }.items():
        monkeypatch.setenv(key, value)
    assert found.is_env_present()
    assert (found.get_process_count(), found.get_process_id()) == (4, 3)
    assert found.get_coordinator_address(1, None) == "localhost:8482"


def test_the_page_names_the_variables_that_jax_reads():
    page = (ROOT / "docs/launching.md").read_text()
    table = page.partition("## How the processes find each other")[2].partition("\n## ")[0]
    source = "".join(
        path.read_text() for path in ROOT.joinpath(clusters.__file__).parent.glob("*.py")
    )
    named = set(re.findall(r"`([A-Z][A-Z_a-z0-9]{5,})`", table))
    assert len(named) > 10
    assert {name for name in named if name not in source and not name.startswith("JAX_")} == set()


def test_the_scripts_are_bash():
    for path in CLUSTER.glob("*.sh"):
        subprocess.run(["bash", "-n", path], check=True)
