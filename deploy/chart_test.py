"""The Helm chart, rendered by Helm itself (pytest): no finding with any set of values, the same as the kustomizations where
both speak, and wrong values refused by name."""
import copy
import importlib.util
import json
import os
import re

import pytest
import yaml

from kubernetes_test import boards, check_arguments, check_probes, check_state, on_gpus
from manifests import (CHART, HERE, KUBERNETES, ROOT, by_kind, helm_documents, helm_findings, helm_module, helm_notes,
                       kustomize, pod_spec, violations)

GPU = {"backend": "cuda", "nodeSelector": {"nvidia.com/gpu.family": "volta"},
       "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]}
DIGEST = "sha256:" + "0123456789abcdef" * 4
EVERYTHING_WATCHED = {"podMonitor": {"enabled": True, "labels": {"release": "kube-prometheus-stack"}},
                      "rules": {"enabled": True, "labels": {"release": "kube-prometheus-stack"}},
                      "dashboard": {"enabled": True}}
SETS = {
    "default": {},
    "v100": GPU,
    "modules": {**GPU, "state": {"kind": "disk", "size": "100Gi", "storageClassName": "fast"}},
    "mtls": {"tls": {"secretName": "attnd-tls", "certificate": {"create": True, "issuerRef": {"name": "ca"}}},
             "tokens": {"secretName": "attnd-tokens"}, "test": {"tokenSecretName": "attnd-test-token"}},
    "fleet": {"image": {"repository": "registry.example/attnd", "digest": DIGEST},
              "imagePullSecrets": [{"name": "registry"}], "monitoring": EVERYTHING_WATCHED,
              "grpcRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["attnd.example"]},
              "pools": [{"name": "v100", **GPU, "replicas": 4, "runtimeClassName": "nvidia", "priorityClassName": "lent",
                         "state": {"kind": "memory", "size": "2Gi"}},
                        {"name": "cpu", "autoscaling": {"kind": "hpa", "maxReplicas": 16},
                         "extraArgs": ["--log_format=json"]}]},
    "scaled": {"state": {"kind": "disk"},
               "autoscaling": {"kind": "keda", "minReplicas": 0, "query": "sum(envoy_cluster_upstream_rq_active)"},
               "extraVolumes": [{"name": "scratch", "emptyDir": {}}], "podAnnotations": {"a.example/b": "c"},
               "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
               "serviceAccount": {"create": False},
               "extraEnv": [{"name": "TZ", "value": "UTC"}], "networkPolicy": {"enabled": False}, "pdb": {"enabled": False}},
}


@pytest.fixture(params=SETS)
def values(request):
    return SETS[request.param]


@pytest.fixture
def documents(values):
    return helm_documents(values, name="job")


def of_kind(documents, *kinds):
    return [document for document in documents if document["kind"] in kinds]


def workloads(documents):
    return of_kind(documents, "Deployment", "StatefulSet")


def test_neither_lint_nor_kubernetes_finds_anything(values, documents):
    assert not helm_findings(values)
    assert {d["metadata"]["name"]: said for d, said in zip(documents, map(violations, documents)) if said} == {}
    names = [(d["kind"], d["metadata"]["name"]) for d in documents]
    assert len(names) == len(set(names)) and workloads(documents)


def test_lint_finds_what_is_planted():
    assert helm_findings({"replicas": "two"}) and helm_findings({"nonsense": 1})


def test_everything_lies_in_the_releases_namespace_and_says_whose_it_is(documents):
    for document in documents:
        assert document["metadata"]["namespace"] == "attnd"
        assert document["metadata"]["labels"]["app.kubernetes.io/instance"] == "job"
        assert len(document["metadata"]["name"]) <= 63


def test_pods_run_with_few_rights_and_are_probed(documents):
    for document in [*workloads(documents), *of_kind(documents, "Pod")]:
        spec = pod_spec(document)
        (container,) = spec["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] and not spec["automountServiceAccountToken"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert spec["securityContext"]["runAsNonRoot"]
        volumes = {v["name"] for v in spec.get("volumes", [])} | {"state"}
        assert {m["name"] for m in container.get("volumeMounts", [])} <= volumes
        if document["kind"] != "Pod":
            check_probes(container)


def test_each_selector_finds_the_pods_of_its_pool_alone(documents):
    pods = {d["metadata"]["name"]: d["spec"]["template"]["metadata"]["labels"] for d in workloads(documents)}
    test_pods = [d["metadata"]["labels"] for d in of_kind(documents, "Pod")]
    one = len(pods) == 1

    def found(selector):
        assert not any(selector.items() <= labels.items() for labels in test_pods)
        return {name for name, labels in pods.items() if selector.items() <= labels.items()}

    for document in workloads(documents):
        assert found(document["spec"]["selector"]["matchLabels"]) == {document["metadata"]["name"]}
    for document in of_kind(documents, "PodDisruptionBudget"):
        assert found(document["spec"]["selector"]["matchLabels"]) == {document["metadata"]["name"]}
    for document in of_kind(documents, "Service"):
        name = document["metadata"]["name"]
        assert found(document["spec"]["selector"]) == ({name} if name in pods and not one else set(pods))
    for document in of_kind(documents, "NetworkPolicy"):
        assert found(document["spec"]["podSelector"]["matchLabels"]) == set(pods)
    for document in of_kind(documents, "PodMonitor"):
        assert found(document["spec"]["selector"]["matchLabels"]) == set(pods)
    for document in of_kind(documents, "HorizontalPodAutoscaler", "ScaledObject"):
        target = document["spec"]["scaleTargetRef"]
        (scaled,) = [d for d in workloads(documents) if d["metadata"]["name"] == target["name"]]
        assert target["kind"] == scaled["kind"] and "replicas" not in scaled["spec"]


def test_names_lead_to_what_exists(documents):
    services = {d["metadata"]["name"] for d in of_kind(documents, "Service")}
    for document in of_kind(documents, "StatefulSet"):
        assert document["spec"]["serviceName"] in services
        check_state(document)
    for document in of_kind(documents, "Pod"):
        (address,) = [a for a in document["spec"]["containers"][0]["args"] if a.startswith("--address=")]
        assert re.fullmatch(r"--address=dns:///(.*)\.attnd:7070", address).group(1) in services
        assert document["metadata"]["annotations"]["helm.sh/hook"] == "test"
    for route in of_kind(documents, "GRPCRoute"):
        assert {ref["name"] for rule in route["spec"]["rules"] for ref in rule["backendRefs"]} <= services


def test_the_daemon_accepts_the_arguments(documents, tmp_path):
    for document in workloads(documents):
        check_arguments(pod_spec(document)["containers"][0]["args"], tmp_path)


def test_attnctl_knows_the_flags_of_the_check(documents):
    source = "".join(open(os.path.join(ROOT, "client", "cli", name)).read() for name in ("session.cc", "attnctl.cc"))
    (pod,) = of_kind(documents, "Pod")
    for argument in pod["spec"]["containers"][0]["args"]:
        assert argument == "check" or f"{argument.split('=')[0]}" in source


# ---- Against the kustomizations.

CHARTS_OWN_LABELS = {"app.kubernetes.io/component", "app.kubernetes.io/version", "app.kubernetes.io/managed-by",
                     "helm.sh/chart"}


def plain(node, key=""):
    """Without what only one of the two says: labels of the chart, an expression that is a label, and the order of lists."""
    if isinstance(node, dict):
        if set(node) == {"matchExpressions"}:
            return {"matchLabels": {e["key"]: e["values"][0] for e in node["matchExpressions"]}}
        return {k: plain(v, k) for k, v in node.items() if k not in CHARTS_OWN_LABELS}
    if isinstance(node, list):
        return sorted((plain(one) for one in node), key=lambda one: json.dumps(one, sort_keys=True))
    return node


def comparable(documents):
    kept = {}
    for document in copy.deepcopy(list(documents)):
        if document["kind"] in ("Namespace", "Pod"):
            continue  # made by --create-namespace; the check
        if document["kind"] == "NetworkPolicy":
            document["spec"]["ingress"][0]["from"] = document["spec"]["ingress"][0]["from"][:1]  # the check's pod
        kept[document["kind"]] = plain(document)
    return kept


@pytest.mark.parametrize("name, release, chart", [
    ("cpu", "attnd", {}), ("v100", "attnd-v100", GPU),
    ("modules", "attnd-v100", {**GPU, "state": {"kind": "disk"}}), ("mtls", "attnd", {"tls": {"secretName": "attnd-tls"}})])
def test_the_chart_makes_what_the_kustomization_makes(name, release, chart):
    kustomized = comparable(by_kind(kustomize(os.path.join(KUBERNETES, "overlays", name))).values())
    from_chart = comparable(helm_documents(chart, name=release))
    assert set(from_chart) == set(kustomized)
    for kind, document in kustomized.items():
        assert from_chart[kind] == document, kind


# ---- Single values.

def test_an_image_by_digest_has_no_tag():
    (one, other) = workloads(helm_documents(SETS["fleet"]))
    assert {pod_spec(d)["containers"][0]["image"] for d in (one, other)} == {f"registry.example/attnd@{DIGEST}"}


def test_pools_differ_in_what_they_name_and_share_the_rest():
    documents = {d["metadata"]["name"]: d for d in workloads(helm_documents(SETS["fleet"]))}
    assert set(documents) == {"attnd-v100", "attnd-cpu"}
    assert on_gpus(by_kind(yaml.safe_dump(documents["attnd-v100"]))) and documents["attnd-v100"]["spec"]["replicas"] == 4
    assert pod_spec(documents["attnd-v100"])["runtimeClassName"] == "nvidia"
    assert "runtimeClassName" not in pod_spec(documents["attnd-cpu"])
    check_state(documents["attnd-v100"])
    assert "--log_format=json" in pod_spec(documents["attnd-cpu"])["containers"][0]["args"]


def test_monitors_carry_the_labels_that_an_operator_selects():
    documents = helm_documents(SETS["fleet"])
    for document in of_kind(documents, "PodMonitor", "PrometheusRule"):
        assert document["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    (rules,), (board,) = of_kind(documents, "PrometheusRule"), of_kind(documents, "ConfigMap")
    with open(os.path.join(HERE, "prometheus", "alerts.yml")) as file:
        assert rules["spec"] == yaml.safe_load(file)
    assert board["data"] == boards()
    (rules,) = of_kind(helm_documents({"monitoring": {"rules": {"enabled": True, "runbooks": "https://wiki.example/attnd"}}}),
                       "PrometheusRule")
    (group,) = rules["spec"]["groups"]
    assert {r["annotations"]["runbook_url"] for r in group["rules"] if "alert" in r} >= {"https://wiki.example/attnd/AttndDown.md"}


def test_the_query_of_a_pool_is_of_its_pods_alone():
    (scaled,) = of_kind(helm_documents({"pools": [{"name": "v100", "autoscaling": {"kind": "keda"}}]}), "ScaledObject")
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    for query, series in zip(queries, ("attnd_queue_estimated_seconds", "attnd_busy_ratio"), strict=True):
        pattern = re.search(r'pod=~"(.*?)"', query).group(1)
        assert series in query
        assert re.fullmatch(pattern, "attnd-v100-7c9f8d6b54-x2x9q")
        assert not re.fullmatch(pattern, "attnd-cpu-7c9f8d6b54-x2x9q")
        assert not re.fullmatch(pattern, "attnd-v100-big-7c9f8d6b54-x2x9q")


def test_the_notes_name_the_address_and_the_next_command():
    notes = helm_notes(SETS["fleet"])
    assert "dns:///attnd.attnd:7070" in notes and "dns:///attnd-v100.attnd:7070" in notes
    assert "helm test -n attnd attnd" in notes and '"attnd-client":"true"' in notes


@pytest.mark.parametrize("wrong, named", [
    ({"replica": 3}, "replica"), ({"replicas": "three"}, "replicas"), ({"backend": "gpu"}, "backend"),
    ({"pools": [{"backend": "cuda"}]}, "name"), ({"pools": [{"name": "a", "tls": {}}]}, "tls"),
    ({"image": {"digest": "sha256:1"}}, "digest"), ({"state": {"kind": "disc"}}, "state"),
    ({"extraArgs": ["log_format=json"]}, "extraArgs"), ({"autoscaling": {"kind": "hpa", "minReplicas": 0}}, "autoscaling"),
    ({"monitoring": {"podMonitor": {"interval": "soon"}}}, "interval"), ({"state": {"size": "much"}}, "size")])
def test_wrong_values_are_refused_by_name(wrong, named):
    with pytest.raises(helm_module().HelmError) as refused:
        helm_documents(wrong)
    assert named in str(refused.value)


# ---- Its files.

def test_the_schema_knows_each_value():
    """A value without an entry would be refused; an entry without a value would be read by nobody."""
    with open(os.path.join(CHART, "values.yaml")) as file:
        values = yaml.safe_load(file)
    with helm_module().Chart.load(CHART) as chart:
        schema = chart.schema
    known = {**schema["properties"], **schema["$defs"]["workload"]["properties"]}

    def compare(properties, given, path):
        assert set(properties) == set(given), path
        for name, inner in properties.items():
            if "properties" in inner and path + name != "resources":
                compare(inner["properties"], given[name], f"{path}{name}.")
    compare({name: one for name, one in known.items() if name != "global"}, values, "")


def test_the_readme_is_made_from_the_values():
    spec = importlib.util.spec_from_file_location("readme", os.path.join(HERE, "helm", "readme.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with open(os.path.join(CHART, "values.yaml")) as file:
        text = file.read()
    with open(os.path.join(CHART, "README.md")) as file:
        assert file.read() == module.readme(text), "run deploy/helm/readme.py"
    leaves = set(re.findall(r"^\| `([\w.]+)`", module.readme(text), re.M))
    assert {"image.digest", "state.kind", "monitoring.podMonitor.labels"} < leaves and len(leaves) > 50
    (fleet,) = re.findall(r"^```yaml\n# fleet.yaml(.*?)^```$", module.readme(text), re.M | re.S)
    assert not helm_findings(yaml.safe_load("#" + fleet))


def test_the_charts_version_is_the_daemons():
    with open(os.path.join(ROOT, "base", "version.h")) as file:
        version = re.search(r'kVersion = "(.*)";', file.read()).group(1)
    with helm_module().Chart.load(CHART) as chart:
        assert chart.version == version and chart.metadata["appVersion"] == version
