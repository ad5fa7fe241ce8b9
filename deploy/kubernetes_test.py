"""The kustomizations, as kubectl renders them (pytest): what they promise, and that what they name exists."""
import copy
import glob
import os
import re
import shutil
import subprocess

import pytest

from manifests import HERE, KUBERNETES, ROOT, by_kind, kustomize, pod_spec, violations

OVERLAYS = sorted(os.path.basename(os.path.dirname(p)) for p in glob.glob(f"{KUBERNETES}/overlays/*/kustomization.yaml"))


def read(*path):
    with open(os.path.join(ROOT, *path)) as file:
        return file.read()


def own_overlay():
    """The kustomization that docs/DEPLOY.md shows for a site of one's own."""
    shown = re.search(r"^```yaml\n(kind: Kustomization\n.*?)^```$", read("docs", "DEPLOY.md"), re.M | re.S).group(1)
    return "apiVersion: kustomize.config.k8s.io/v1beta1\n" + shown


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory):
    """Where a user's overlay would stand, beside the others."""
    top = tmp_path_factory.mktemp("own")
    for name in ("kubernetes", "grafana"):
        shutil.copytree(os.path.join(HERE, name), top / name)
    folder = top / "kubernetes" / "overlays" / "own"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(own_overlay())
    return str(folder)


@pytest.fixture(params=[*OVERLAYS, "own"])
def overlay(request, own_folder):
    return own_folder if request.param == "own" else os.path.join(KUBERNETES, "overlays", request.param)


@pytest.fixture
def resources(overlay):
    return by_kind(kustomize(overlay))


def boards():
    """{file: text}"""
    return {name: read("deploy", "grafana", name) for name in os.listdir(os.path.join(HERE, "grafana")) if ".json" in name}


def is_own(resources):
    return "HorizontalPodAutoscaler" in resources


def workload(resources):
    return resources.get("Deployment") or resources["StatefulSet"]


def pod(resources):
    return pod_spec(workload(resources))


def container(resources):
    (only,) = pod(resources)["containers"]
    return only


def on_gpus(resources):
    return "nvidia.com/gpu" in container(resources)["resources"]["limits"]


def test_overlays_are_all_there():
    assert OVERLAYS == ["cpu", "modules", "mtls", "v100"]


def test_nothing_runs_with_more_rights_than_it_needs(resources):
    context = container(resources)["securityContext"]
    assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
    assert context["capabilities"] == {"drop": ["ALL"]} and "privileged" not in context
    assert pod(resources)["securityContext"]["runAsNonRoot"]
    assert pod(resources)["securityContext"]["runAsUser"] == 65532
    assert pod(resources)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod(resources)["automountServiceAccountToken"] and not pod(resources).get("hostNetwork")


def check_probes(one):
    """They ask the metrics port, which needs no certificate, and bear a slow answer. A frozen daemon goes in a minute."""
    ports = {p["name"] for p in one["ports"]}
    for kind, path in (("startupProbe", "/healthz"), ("readinessProbe", "/healthz"), ("livenessProbe", "/livez")):
        assert one[kind]["httpGet"]["path"] == path and one[kind]["httpGet"]["port"] in ports, kind
        assert one[kind]["timeoutSeconds"] >= 3 and one[kind]["failureThreshold"] >= 2, kind
    alive = one["livenessProbe"]
    frozen = alive["failureThreshold"] * max(alive["periodSeconds"], alive["timeoutSeconds"]) + alive["periodSeconds"]
    assert frozen + alive["terminationGracePeriodSeconds"] <= 30
    source = read("server", "app", "metrics_port.cc")
    assert all(f'path == "{path}"' in source for path in ("/healthz", "/livez"))


def test_probes_ask_what_exists_and_bear_a_slow_answer(resources):
    check_probes(container(resources))


def test_pods_on_gpus_are_not_throttled(resources):
    assert ("cpu" in container(resources)["resources"]["limits"]) != on_gpus(resources)


def test_services_policies_and_monitors_select_the_pods(resources):
    labels = workload(resources)["spec"]["template"]["metadata"]["labels"]
    assert workload(resources)["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert resources["Service"]["spec"]["selector"].items() <= labels.items()
    assert resources["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert resources["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    ports = {p["name"] for p in container(resources)["ports"]}
    assert {p["targetPort"] for p in resources["Service"]["spec"]["ports"]} <= ports
    assert all(p["appProtocol"] for p in resources["Service"]["spec"]["ports"])
    assert {p["port"] for rule in resources["NetworkPolicy"]["spec"]["ingress"] for p in rule["ports"]} <= ports
    assert all(rule["from"] for rule in resources["NetworkPolicy"]["spec"]["ingress"])
    assert resources["Service"]["spec"]["clusterIP"] == "None"


def test_callers_need_the_labels_of_callers_alone(resources):
    """An overlay's labels go into selectors of the daemon's pods, not of its callers."""
    (peer,) = resources["NetworkPolicy"]["spec"]["ingress"][0]["from"]
    assert peer["namespaceSelector"] == {"matchLabels": {"attnd-client": "true"}}
    assert peer["podSelector"] == {"matchExpressions": [{"key": "attnd-client", "operator": "In", "values": ["true"]}]}


def test_overlays_for_cpus_and_gpus_fit_into_one_namespace():
    """No name stands in both, and none selects the other's pods."""
    cpu, v100 = (by_kind(kustomize(os.path.join(KUBERNETES, "overlays", name))) for name in ("cpu", "v100"))
    for kind in set(cpu) - {"Namespace"}:
        assert cpu[kind]["metadata"]["name"] != v100[kind]["metadata"]["name"], kind
    for one, other in ((cpu, v100), (v100, cpu)):
        labels = workload(other)["spec"]["template"]["metadata"]["labels"]
        for selector in (workload(one)["spec"]["selector"]["matchLabels"], one["Service"]["spec"]["selector"],
                         one["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
                         one["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]):
            assert not selector.items() <= labels.items()


def test_a_replica_is_never_missing_during_an_update_but_where_it_would_need_another_gpu(resources):
    if "StatefulSet" in resources:
        assert resources["StatefulSet"]["spec"]["updateStrategy"] == {"type": "RollingUpdate"}
        return
    deployment = resources["Deployment"]["spec"]
    gpus = int(on_gpus(resources))
    assert deployment["strategy"] == {"type": "RollingUpdate",
                                      "rollingUpdate": {"maxUnavailable": gpus, "maxSurge": 1 - gpus}}
    replicas = resources["HorizontalPodAutoscaler"]["spec"]["minReplicas"] if is_own(resources) else deployment["replicas"]
    assert resources["PodDisruptionBudget"]["spec"]["maxUnavailable"] < replicas
    assert resources["PodDisruptionBudget"]["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_a_first_apply_needs_nothing_that_a_new_cluster_lacks(resources):
    foreign = {kind for kind, document in resources.items() if "coreos.com" in document["apiVersion"]}
    assert foreign == ({"PodMonitor", "PrometheusRule"} if is_own(resources) else set())
    namespace = resources["Namespace"]["metadata"]["name"]
    assert {d["metadata"]["namespace"] for kind, d in resources.items() if kind != "Namespace"} == {namespace}
    assert resources["ServiceAccount"]["metadata"]["name"] == pod(resources)["serviceAccountName"]
    assert not resources["ServiceAccount"]["automountServiceAccountToken"]


def test_pods_are_spread_over_hosts_and_zones(resources):
    labels = workload(resources)["spec"]["template"]["metadata"]["labels"]
    spread = pod(resources)["topologySpreadConstraints"]
    assert [s["topologyKey"] for s in spread] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    for constraint in spread:
        assert constraint["labelSelector"]["matchLabels"].items() <= labels.items()
        assert constraint["whenUnsatisfiable"] == "ScheduleAnyway" and constraint["maxSkew"] == 1


def check_state(one):
    """Modules' states lie in a private folder, which the daemon makes, of a volume that the pod keeps."""
    (mount,) = [m for m in pod_spec(one)["containers"][0]["volumeMounts"] if m["name"] == "state"]
    assert f"--module_state_dir={mount['mountPath']}/state" in pod_spec(one)["containers"][0]["args"]
    context = pod_spec(one)["securityContext"]
    # The kubelet would else give the states themselves to the group at each start, and the daemon refuse them.
    assert context["fsGroup"] == 65532 and context["fsGroupChangePolicy"] == "OnRootMismatch"


def test_states_of_modules_outlive_the_pod():
    one = by_kind(kustomize(os.path.join(KUBERNETES, "overlays", "modules")))
    check_state(one["StatefulSet"])
    assert one["StatefulSet"]["spec"]["serviceName"] == one["Service"]["metadata"]["name"]
    (claim,) = one["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "state" and claim["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_kubernetes_accepts_each_resource(resources):
    assert {kind: said for kind, said in zip(resources, map(violations, resources.values())) if said} == {}
    for path, value in (("replicas", "two"), ("topologySpread", [])):
        planted = copy.deepcopy(workload(resources))
        planted["spec"][path] = value
        assert violations(planted), path
    assert violations({**workload(resources), "apiVersion": "apps/v2"}) == "no such kind"


# ---- The components, as docs/DEPLOY.md's own overlay has them.

def test_the_monitor_finds_the_pods_and_alerts_and_dashboard_are_the_files(own_folder):
    resources = by_kind(kustomize(own_folder))
    labels = workload(resources)["spec"]["template"]["metadata"]["labels"]
    monitor = resources["PodMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert {e["port"] for e in monitor["podMetricsEndpoints"]} <= {p["name"] for p in container(resources)["ports"]}
    assert monitor["podMetricsEndpoints"][0]["relabelings"] == [{"targetLabel": "job", "replacement": "attnd"}]
    assert resources["ConfigMap"]["data"] == boards()
    assert resources["ConfigMap"]["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert container(resources)["image"] == "registry.example/attnd:0.1.0"


def test_the_rules_for_the_operator_are_those_for_prometheus():
    path = "deploy/kubernetes/components/monitoring/prometheusrule.yaml"
    head, spec, rules = read(path).partition("\nspec:\n")
    expected = "".join(f"  {line}" if line.strip() else line
                       for line in read("deploy", "prometheus", "alerts.yml").splitlines(True))
    assert rules == expected, f"{path}: all below spec is deploy/prometheus/alerts.yml, two spaces to the right"


def test_scaling_follows_series_that_exist(own_folder):
    resources = by_kind(kustomize(own_folder))
    scaler = resources["HorizontalPodAutoscaler"]["spec"]
    assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment",
                                        "name": resources["Deployment"]["metadata"]["name"]}
    metrics = [m["pods"]["metric"]["name"] for m in scaler["metrics"]]
    assert metrics == ["attnd_queue_estimated_seconds", "attnd_busy_ratio"]
    assert all(re.search(rf"^\| `{metric}` \| gauge \|", read("docs", "METRICS.md"), re.M) for metric in metrics)
    assert "replicas" not in resources["Deployment"]["spec"], "an apply would undo the scaler's number"


def test_samples_are_accepted_and_preempt_nobody():
    with open(os.path.join(KUBERNETES, "samples", "lend.yaml")) as file:
        one = by_kind(file.read())["PriorityClass"]
    assert not violations(one) and one["value"] < 0 and one["preemptionPolicy"] == "Never" and not one["globalDefault"]
    with open(os.path.join(KUBERNETES, "samples", "kueue.yaml")) as file:
        queues = by_kind(file.read())
    assert queues["LocalQueue"]["spec"]["clusterQueue"] == queues["ClusterQueue"]["metadata"]["name"]
    (group,) = queues["ClusterQueue"]["spec"]["resourceGroups"]
    for flavor in group["flavors"]:
        assert [r["name"] for r in flavor["resources"]] == group["coveredResources"]
        assert all(r["nominalQuota"] == 0 for r in flavor["resources"])  # borrowed alone


# ---- The daemon.

def make_certificate(folder):
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-days", "1", "-subj", "/CN=attnd", "-keyout", f"{folder}/tls.key", "-out", f"{folder}/tls.crt"],
                   check=True, capture_output=True, stdin=subprocess.DEVNULL)
    shutil.copy(f"{folder}/tls.crt", f"{folder}/ca.crt")


def check_arguments(arguments, folder):
    """attnd's own check; what secrets and volumes would mount is made in `folder`."""
    if any(a.startswith("--tls_") for a in arguments):
        make_certificate(folder)
    (folder / "state").mkdir(mode=0o700, exist_ok=True)  # in a volume the daemon makes it
    (folder / "tokens").write_text("caller " + "x" * 20 + "\n")
    (folder / "tokens").chmod(0o400)
    for mounted, there in (("/etc/attnd/tls/", f"{folder}/"), ("/etc/attnd/tokens/", f"{folder}/"),
                           ("/var/lib/attnd/", f"{folder}/")):
        arguments = [a.replace(mounted, there) for a in arguments]
    arguments = [a for a in arguments if a != "--backend=cuda"]  # there is no GPU here
    done = subprocess.run([os.path.join(ROOT, "bazel-bin", "server", "attnd"), *arguments, "--check_config"],
                          capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr


def test_the_daemon_accepts_the_arguments(resources, tmp_path):
    check_arguments(container(resources)["args"], tmp_path)


def test_the_image_exposes_the_pods_ports():
    text = read("deploy", "Containerfile")
    exposed = re.search(r"^EXPOSE (.*)$", text[text.rindex("\nFROM "):], re.M).group(1).split()
    ports = container(by_kind(kustomize(os.path.join(KUBERNETES, "overlays", "cpu"))))["ports"]
    assert exposed == [str(p["containerPort"]) for p in ports]
