"""The files of ``examples/clusters`` for Kubernetes: the schemas of their kinds know each field, and a run fits in.

The schemas are those of Kubeflow's Python package (``make frameworks``), and, where ``STAGEREG_CRDS`` names a folder of
CustomResourceDefinitions, the ones that an API server has: each ``*.yaml`` of JobSet, Kubeflow Trainer and KubeRay.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stagereg.assembly import Preemption

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
NAMES = ("jobset", "kubeflow", "ray")
MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "ClusterTrainingRuntime": "TrainerV1alpha1ClusterTrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((CLUSTERS / f"{name}.yaml").read_text()))


def found(tree: Any, key: str) -> Iterator[Any]:
    """Each value of this key, wherever it is."""
    if isinstance(tree, dict):
        yield from ([tree[key]] if key in tree else [])
    for each in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from found(each, key)


def unknown(tree: Any, schema: dict[str, Any], path: str) -> list[str]:
    """Return the fields that a structural schema does not have, of which an API server says "unknown field"."""
    if isinstance(tree, list):
        return [each for x in tree for each in unknown(x, schema["items"], f"{path}[]")]
    if not isinstance(tree, dict) or path == ".metadata" or schema.get("x-kubernetes-preserve-unknown-fields"):
        return []
    known, other = schema.get("properties", {}), schema.get("additionalProperties")
    return [
        each
        for name, x in tree.items()
        for each in (
            [f"{path}.{name}"]
            if name not in known and not other
            else unknown(x, known.get(name) or other, f"{path}.{name}")
        )
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_pod_has_the_time_the_volumes_and_the_policy_that_a_run_needs(name: str) -> None:
    grace = Preemption().grace_period
    (pod,) = [each for each in found(objects(name), "spec") if "terminationGracePeriodSeconds" in each]
    assert grace is not None
    assert pod["terminationGracePeriodSeconds"] >= 2 * grace.total_seconds()
    volumes = {each["name"]: each for each in pod["volumes"]}
    (container,) = pod["containers"]
    mounts = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert mounts["/tier"]["hostPath"]["path"].startswith("/dev/shm/"), "tier=memory, and it outlives the pod"
    assert "persistentVolumeClaim" in mounts["/checkpoints"]
    if name != "ray":
        assert pod["restartPolicy"] == "Never", "podFailurePolicy asks for it"
        (policy,), (rules,) = found(objects(name), "podFailurePolicy"), found(objects(name), "failurePolicy")
        assert policy["rules"][0] == {
            "action": "FailJob",
            "onExitCodes": {"containerName": container["name"], "operator": "In", "values": [os.EX_TEMPFAIL]},
        }
        assert rules["rules"][0]["action"] == "RestartJobSetAndIgnoreMaxRestarts"
        assert rules["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]


@pytest.mark.parametrize("name", NAMES)
def test_the_command_of_a_pod_is_understood(name: str) -> None:
    from torch.distributed.run import get_args_parser

    if name == "ray":
        (entrypoint,) = found(objects(name), "entrypoint")
        command = ["stagereg", "run", *shlex.split(entrypoint)[1:]]
    else:
        ((*_, command),) = [
            [a + b for a, b in zip(found(objects(name), "command"), found(objects(name), "args"), strict=True)]
        ]
    assert command[:2] == ["stagereg", "run"]
    asked = get_args_parser().parse_args([each.replace("$(JOB_COMPLETION_INDEX)", "1") for each in command[2:]])
    assert asked.training_script == "train.py"
    assert {"checkpoint.dir=/checkpoints/gpt7/checkpoints", "tier=memory", "tier.dir=/tier"} <= {
        *asked.training_script_args
    }
    assert asked.node_rank == (1 if name == "jobset" else 0)


@pytest.mark.parametrize("name", NAMES)
def test_kubeflows_models_keep_each_field(name: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="make frameworks installs it")
    known = [each for each in objects(name) if each["kind"] in MODELS]
    if not known:
        pytest.skip("no Python package has models of KubeRay's kinds")
    for each in known:
        assert getattr(models, MODELS[each["kind"]]).from_dict(each).to_dict() == each


@pytest.mark.skipif("STAGEREG_CRDS" not in os.environ, reason="STAGEREG_CRDS names no folder of definitions")
@pytest.mark.parametrize("name", NAMES)
def test_an_api_server_knows_each_field(name: str) -> None:
    jsonschema, loader = pytest.importorskip("jsonschema"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for each in objects(name):
        texts = (path.read_text() for path in Path(os.environ["STAGEREG_CRDS"]).glob("*.yaml"))
        (definition,) = [yaml.load(text, loader) for text in texts if f"\n    kind: {each['kind']}\n" in text]
        spec = definition["spec"]
        (schema,) = [
            version["schema"]["openAPIV3Schema"]
            for version in spec["versions"]
            if each["apiVersion"] == f"{spec['group']}/{version['name']}"
        ]
        assert unknown(each, schema, "") == []
        assert [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(each)] == []
