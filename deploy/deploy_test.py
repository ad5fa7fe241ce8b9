"""The deployment files, checked without a cluster (pytest): what they promise, that what they name exists, and that
the alerts fire. Metric names are those of docs/METRICS.md."""
import glob
import json
import os
import re
import shutil
import subprocess
import time
import urllib.request

import pytest
import yaml

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)


def read(*path):
    with open(os.path.join(ROOT, *path)) as file:
        return file.read()


def documented_metrics():
    """Rows of docs/METRICS.md: | `name` | type | ..."""
    return dict(re.findall(r"^\| `(\w+)` \| (\w+)", read("docs", "METRICS.md"), re.M))


def unknown_metrics(expression, known):
    without_labels = re.sub(r"\{[^}]*\}|\"[^\"]*\"", "", expression)
    for name in re.findall(r"\b(?:attnd|process)_\w+", without_labels):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        if name not in known and not (base in known and known[base] == "histogram"):
            yield name


def test_unknown_metric_is_found():
    known = {"attnd_a_total": "counter", "attnd_b_seconds": "histogram"}
    assert not list(unknown_metrics('rate(attnd_a_total{job="attnd_x"}[5m]) + attnd_b_seconds_bucket', known))
    assert list(unknown_metrics("attnd_a_total_sum + attnd_c", known)) == ["attnd_a_total_sum", "attnd_c"]


# ---- Prometheus.

def promtool(*arguments, stdin=""):
    done = subprocess.run(["promtool", *arguments], cwd=os.path.join(HERE, "prometheus"), capture_output=True, text=True,
                          input=stdin)
    assert done.returncode == 0, done.stdout + done.stderr


def test_scrape_configuration_is_valid():
    promtool("check", "config", "prometheus.yml")


def test_alerts_fire_when_they_should():
    promtool("test", "rules", "alerts_test.yml")


@pytest.fixture
def daemon(tmp_path):
    """A running daemon that has had calls: the port of its metrics."""
    ports, metrics = tmp_path / "ports", tmp_path / "metrics"
    process = subprocess.Popen([os.path.join(ROOT, "bazel-bin", "server", "attnd"), "--listen", "127.0.0.1:0",
                                "--metrics_listen", "127.0.0.1:0", "--metrics_port_file", str(metrics), "--port_file",
                                str(ports), "--backend", "cpu", "--memory_limit_mib", "64", "--drain_delay", "0"],
                               stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while not ports.exists() or not metrics.exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        attnctl("--address", f"127.0.0.1:{ports.read_text().strip()}", "check", "--count", "3")
        yield metrics.read_text().strip()
    finally:
        process.terminate()
        process.communicate()


def attnctl(*arguments):
    return subprocess.run([os.path.join(ROOT, "bazel-bin", "client", "attnctl"), *arguments], check=True,
                          capture_output=True, stdin=subprocess.DEVNULL, text=True).stdout


def test_what_the_daemon_exposes_is_valid(daemon):
    with urllib.request.urlopen(f"http://127.0.0.1:{daemon}/metrics") as answer:
        text = answer.read().decode()
    assert 'attnd_requests_total{code="OK",method="Forward"}' in text
    promtool("check", "metrics", stdin=text)


def test_a_frame_of_attnctl_top_is_a_line_of_json_or_a_page(daemon):
    top = ("top", "--once", "--interval", "0.1", "--metrics", f"http://127.0.0.1:{daemon}/metrics")
    lines = attnctl(*top, "-o", "json").splitlines()
    assert len(lines) == 1 and json.loads(lines[0])["ready"] is True
    page = attnctl(*top)
    assert page.startswith("READY") and "cpu" in page and "\033" not in page


def alert_rules():
    return [r for g in yaml.safe_load(read("deploy", "prometheus", "alerts.yml"))["groups"] for r in g["rules"]]


def test_each_alert_has_a_test_a_severity_and_advice():
    tested = read("deploy", "prometheus", "alerts_test.yml")
    for rule in filter(lambda r: "alert" in r, alert_rules()):
        assert f"alertname: {rule['alert']}" in tested, rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]


def test_alerts_name_metrics_that_exist():
    known = documented_metrics()
    for rule in alert_rules():
        assert not list(unknown_metrics(rule["expr"], known)), rule


# ---- Grafana.

def dashboard():
    return json.loads(read("deploy", "grafana", "attnd.json"))


def panels():
    return [p for p in dashboard()["panels"] if p["type"] != "row"]


def expressions():
    return [t["expr"] for p in panels() for t in p["targets"]]


def test_dashboard_names_metrics_that_exist():
    known = documented_metrics()
    assert expressions()
    for expression in expressions():
        assert not list(unknown_metrics(expression, known)), expression


def test_dashboard_shows_each_kind_of_trouble():
    """Every metric that an alert rests on is on the dashboard too."""
    shown = " ".join(expressions())
    for rule in alert_rules():
        for name in re.findall(r"\battnd_\w+_(?:total|seconds)\b", rule["expr"]):
            assert name in shown, (rule, name)


def test_each_panel_is_labelled_and_selects_job_and_instance():
    ids = [p["id"] for p in dashboard()["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels():
        assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            selectors = re.findall(r"\{([^}]*)\}", target["expr"])
            assert selectors and all('job=~"$job",instance=~"$instance"' in s for s in selectors), target["expr"]
            assert not re.search(r"\[\d+[smh]\]", target["expr"]), target["expr"]
            for counter in re.findall(r"(\S{0,6})\battnd_\w+_total\b", target["expr"]):
                assert counter.endswith("rate("), target["expr"]
    assert not dashboard()["editable"]


def test_panels_of_a_device_follow_the_variable():
    """Whatever has the label device is selected by it."""
    rows = re.findall(r"^\| `(\w+)` \| \w+ \| ([^|]*) \|", read("docs", "METRICS.md"), re.M)
    of_devices = {name for name, labels in rows if "device" in labels.replace(" ", "").split(",")}
    found = set()
    for expression in expressions():
        for name, selector in re.findall(r"\b(attnd_\w+)\{([^}]*)\}", expression):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            belongs = bool({name, base} & of_devices)
            found |= {base} if belongs else set()
            assert belongs == ('device=~"$device"' in selector), expression
    assert len(found) > 10
    assert [v["name"] for v in dashboard()["templating"]["list"]] == ["datasource", "job", "instance", "device"]


def test_thresholds_and_annotations_tell_good_from_bad():
    steps = {p["title"]: p["fieldConfig"]["defaults"]["thresholds"]["steps"] for p in panels()
             if "thresholds" in p["fieldConfig"]["defaults"]}
    assert {"Failed share", "Waiting work", "Ready", "Certificates: time left"} <= set(steps)
    for title, colours in steps.items():
        values = [step["value"] for step in colours]
        assert values[0] is None and values[1:] == sorted(values[1:]), title
    notes = {note["name"]: note["expr"] for note in dashboard()["annotations"]["list"]}
    assert set(notes) == {"Alerts", "Starts", "Drains"}
    known = documented_metrics()
    assert not [name for expression in notes.values() for name in unknown_metrics(expression, known)]


def test_panels_do_not_overlap():
    cells = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        covered = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not covered & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        cells |= covered


def test_each_expression_parses(tmp_path):
    rules = [{"record": f"check:{i}", "expr": e.replace("$__rate_interval", "1m").replace("$job", "a")
              .replace("$instance", "b").replace("$device", "c")} for i, e in enumerate(expressions())]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", str(path))


# ---- Kubernetes. The patches of the overlays are applied here as kustomize does (RFC 6902).

KUBERNETES = os.path.join(HERE, "kubernetes")


def apply_patch(document, operations):
    for operation in operations:
        *parents, last = [p.replace("~1", "/") for p in operation["path"].strip("/").split("/")]
        at = document
        for part in parents:
            at = at[int(part)] if isinstance(at, list) else at[part]
        if operation["op"] == "remove":
            del at[last]
        elif isinstance(at, list):
            assert operation["op"] == "add" or int(last) < len(at), operation
            if operation["op"] == "replace":
                at[int(last)] = operation["value"]
            else:
                at.insert(len(at) if last == "-" else int(last), operation["value"])
        else:
            assert operation["op"] == "add" or last in at, operation
            at[last] = operation["value"]


def generate(folder, wish):
    """A ConfigMap of files."""
    data = {name: read(folder, name) for name in wish["files"]}
    labels = wish["options"]["labels"]
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": wish["name"], "labels": labels}, "data": data}


def render(folder, resources=None):
    """The resources of one kustomization, {kind: document}; each kind stands once. Of a component: added to those."""
    with open(os.path.join(folder, "kustomization.yaml")) as file:
        kustomization = yaml.safe_load(file)
    resources = {} if resources is None else resources
    for name in kustomization.get("resources", []):
        path = os.path.normpath(os.path.join(folder, name))
        if os.path.isdir(path):
            resources.update(render(path))
        else:
            with open(path) as file:
                for document in yaml.safe_load_all(file):
                    assert document["kind"] not in resources
                    resources[document["kind"]] = document
    for wish in kustomization.get("configMapGenerator", []):
        resources["ConfigMap"] = generate(folder, wish)
    for name in kustomization.get("components", []):
        render(os.path.normpath(os.path.join(folder, name)), resources)
    for patch in kustomization.get("patches", []):
        apply_patch(resources[patch["target"]["kind"]], yaml.safe_load(patch["patch"]))
    for image in kustomization.get("images", []):
        assert container(resources)["image"].startswith(image["name"] + ":")
        container(resources)["image"] = f"{image['newName']}:{image['newTag']}"
    if "namespace" in kustomization:
        for kind, document in resources.items():
            document["metadata"]["name" if kind == "Namespace" else "namespace"] = kustomization["namespace"]
    return resources


OVERLAYS = sorted(os.path.basename(os.path.dirname(p)) for p in glob.glob(f"{KUBERNETES}/overlays/*/kustomization.yaml"))


def own_overlay():
    """The kustomization that docs/DEPLOY.md shows for a site of one's own."""
    lines = re.search(r"^    kind: Kustomization\n(?:    .*\n)+", read("docs", "DEPLOY.md"), re.M).group(0)
    return "apiVersion: kustomize.config.k8s.io/v1beta1\n" + re.sub(r"^    ", "", lines, flags=re.M)


@pytest.fixture(params=[*OVERLAYS, "own"])
def overlay(request, tmp_path):
    """A folder; "own" is where a user's would stand, beside the others."""
    if request.param != "own":
        return os.path.join(KUBERNETES, "overlays", request.param)
    for name in ("kubernetes", "grafana"):
        shutil.copytree(os.path.join(HERE, name), tmp_path / name)
    folder = tmp_path / "kubernetes" / "overlays" / "own"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(own_overlay())
    return str(folder)


@pytest.fixture
def resources(overlay):
    return render(overlay)


def is_own(resources):
    return "HorizontalPodAutoscaler" in resources


def pod(resources):
    return resources["Deployment"]["spec"]["template"]["spec"]


def container(resources):
    (only,) = pod(resources)["containers"]
    return only


def test_overlays_are_all_there():
    assert OVERLAYS == ["cpu", "mtls", "v100"]


def test_nothing_runs_with_more_rights_than_it_needs(resources):
    context = container(resources)["securityContext"]
    assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
    assert context["capabilities"] == {"drop": ["ALL"]} and "privileged" not in context
    assert pod(resources)["securityContext"]["runAsNonRoot"]
    assert pod(resources)["securityContext"]["runAsUser"] == 65532
    assert pod(resources)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod(resources)["automountServiceAccountToken"] and not pod(resources).get("hostNetwork")


def test_probes_name_ports_and_services_that_exist(resources):
    ports = {p["name"]: p["containerPort"] for p in container(resources)["ports"]}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container(resources)[kind]
        if "grpc" in probe:
            assert probe["grpc"]["port"] in ports.values()
            assert probe["grpc"].get("service", "") in ("", "attnd.v1.Attention")
            assert "--insecure" in container(resources)["args"], "the kubelet's gRPC probe cannot speak TLS"
        elif "tcpSocket" in probe:
            assert probe["tcpSocket"]["port"] in ports
        else:
            assert probe["exec"]["command"][0] == "/opt/attnd/attnctl"


def test_services_policies_and_monitors_select_the_pods(resources):
    labels = resources["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert resources["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert resources["Service"]["spec"]["selector"].items() <= labels.items()
    assert resources["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert resources["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    ports = {p["name"] for p in container(resources)["ports"]}
    assert {p["targetPort"] for p in resources["Service"]["spec"]["ports"]} <= ports
    assert {p["port"] for rule in resources["NetworkPolicy"]["spec"]["ingress"] for p in rule["ports"]} <= ports
    assert all(rule["from"] for rule in resources["NetworkPolicy"]["spec"]["ingress"])
    assert resources["Service"]["spec"]["clusterIP"] == "None"


def test_a_replica_is_never_missing_during_an_update_but_where_it_would_need_another_gpu(resources):
    deployment = resources["Deployment"]["spec"]
    on_gpus = "nvidia.com/gpu" in container(resources)["resources"]["limits"]
    assert deployment["strategy"]["type"] == "RollingUpdate"
    assert deployment["strategy"]["rollingUpdate"] == {"maxUnavailable": int(on_gpus), "maxSurge": 1 - int(on_gpus)}
    replicas = resources["HorizontalPodAutoscaler"]["spec"]["minReplicas"] if is_own(resources) else deployment["replicas"]
    assert resources["PodDisruptionBudget"]["spec"]["maxUnavailable"] < replicas


def test_a_first_apply_needs_nothing_that_a_new_cluster_lacks(resources):
    foreign = {kind for kind, document in resources.items() if "coreos.com" in document["apiVersion"]}
    assert foreign == ({"ServiceMonitor", "PrometheusRule"} if is_own(resources) else set())
    namespace = resources["Namespace"]["metadata"]["name"]
    assert {d["metadata"]["namespace"] for kind, d in resources.items() if kind != "Namespace"} == {namespace}
    assert resources["ServiceAccount"]["metadata"]["name"] == pod(resources)["serviceAccountName"]
    assert not resources["ServiceAccount"]["automountServiceAccountToken"]


def test_pods_are_spread_over_hosts_and_zones(resources):
    labels = resources["Deployment"]["spec"]["template"]["metadata"]["labels"]
    spread = pod(resources)["topologySpreadConstraints"]
    assert [s["topologyKey"] for s in spread] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    for constraint in spread:
        assert constraint["labelSelector"]["matchLabels"].items() <= labels.items()
        assert constraint["whenUnsatisfiable"] == "ScheduleAnyway" and constraint["maxSkew"] == 1


def violations(document):
    """What Kubernetes' own schemas say, as the API server would; of its own kinds alone."""
    import kubernetes_validate
    try:
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        return "" if "coreos.com" in document["apiVersion"] else "no such kind"
    except kubernetes_validate.ValidationError as error:
        return error.message
    return ""


KUBERNETES_VERSION = "1.32"


def test_kubernetes_accepts_each_resource(resources):
    assert {kind: said for kind, said in zip(resources, map(violations, resources.values())) if said} == {}
    for path, value in (("/spec/replicas", "two"), ("/spec/template/spec/topologySpread", [])):
        planted = json.loads(json.dumps(resources["Deployment"]))
        apply_patch(planted, [{"op": "add", "path": path, "value": value}])
        assert violations(planted), path
    assert violations({**resources["Deployment"], "apiVersion": "apps/v2"}) == "no such kind"


# ---- The components, as docs/DEPLOY.md's own overlay has them.

@pytest.mark.parametrize("overlay", ["own"], indirect=True)
def test_the_monitors_select_the_service_and_alerts_and_dashboard_are_the_files(resources):
    assert resources["ServiceMonitor"]["spec"]["selector"]["matchLabels"].items() <= \
        resources["Service"]["metadata"]["labels"].items()
    ports = {p["name"] for p in container(resources)["ports"]}
    assert {e["port"] for e in resources["ServiceMonitor"]["spec"]["endpoints"]} <= ports
    assert resources["ConfigMap"]["data"] == {"attnd.json": read("deploy", "grafana", "attnd.json")}
    assert resources["ConfigMap"]["metadata"]["labels"] == {"grafana_dashboard": "1"}


def test_the_rules_for_the_operator_are_those_for_prometheus():
    path = "deploy/kubernetes/components/monitoring/prometheusrule.yaml"
    head, spec, rules = read(path).partition("\nspec:\n")
    expected = "".join(f"  {line}" if line.strip() else line
                       for line in read("deploy", "prometheus", "alerts.yml").splitlines(True))
    assert rules == expected, f"{path}: all below spec is deploy/prometheus/alerts.yml, two spaces to the right"


@pytest.mark.parametrize("overlay", ["own"], indirect=True)
def test_scaling_follows_the_estimated_queue(resources):
    scaler = resources["HorizontalPodAutoscaler"]["spec"]
    assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment",
                                        "name": resources["Deployment"]["metadata"]["name"]}
    (metric,) = [m["pods"]["metric"]["name"] for m in scaler["metrics"]]
    assert documented_metrics()[metric] == "gauge"
    assert "replicas" not in resources["Deployment"]["spec"], "an apply would undo the scaler's number"


def test_the_daemon_accepts_the_arguments(resources, tmp_path):
    """attnd's own check; files that a secret would mount are made here, and the socket's folder is a volume."""
    arguments = [a.replace("unix:/run/attnd/", f"unix:{tmp_path}/") for a in container(resources)["args"]]
    if any(a.startswith("--tls_") for a in arguments):
        make_certificate(tmp_path)
        arguments = [re.sub(r"/etc/attnd/tls/", f"{tmp_path}/", a) for a in arguments]
    arguments = [a for a in arguments if a != "--backend=cuda"]  # there is no GPU here
    done = subprocess.run([os.path.join(ROOT, "bazel-bin", "server", "attnd"), *arguments, "--check_config"],
                          capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr


def make_certificate(folder):
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-days", "1", "-subj", "/CN=attnd", "-keyout", f"{folder}/tls.key", "-out", f"{folder}/tls.crt"],
                   check=True, capture_output=True, stdin=subprocess.DEVNULL)
    shutil.copy(f"{folder}/tls.crt", f"{folder}/ca.crt")


def test_kustomize_renders_the_same(overlay):
    """Where kubectl is installed: its rendering agrees with the one above."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here")
    done = subprocess.run(["kubectl", "kustomize", overlay], check=True, capture_output=True, text=True)
    rendered = {d["kind"]: d for d in yaml.safe_load_all(done.stdout)}
    assert rendered == render(overlay)


# ---- systemd and the container.

def unit_options():
    text = read("deploy", "systemd", "attnd.service")
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.M))


def test_unit_is_hardened_and_drains():
    options = unit_options()
    for key, value in {"Type": "notify", "DynamicUser": "yes", "NoNewPrivileges": "yes", "ProtectSystem": "strict",
                       "KillSignal": "SIGTERM", "Restart": "on-failure", "CapabilityBoundingSet": ""}.items():
        assert options[key] == value, key
    assert int(options["TimeoutStopSec"]) >= 60
    assert 1024 <= int(options["TasksMax"]) <= 8192
    verify_unit(os.path.join(HERE, "systemd", "attnd.service"))


def verify_unit(path):
    """Where systemd is installed: it knows every line. The programs lie elsewhere here."""
    if shutil.which("systemd-analyze"):
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True)
        name = os.path.basename(path)
        complaints = [line for line in done.stderr.splitlines()
                      if name.split("@")[0] in line and "is not executable" not in line]
        assert not complaints, done.stderr


def gpu_drop_in():
    return read("deploy", "systemd", "attnd@.service.d", "gpu.conf")


def test_unit_of_each_gpu_is_the_same_but_for_what_it_names(tmp_path):
    shutil.copy(os.path.join(HERE, "systemd", "attnd.service"), tmp_path / "attnd@.service")
    shutil.copytree(os.path.join(HERE, "systemd", "attnd@.service.d"), tmp_path / "attnd@.service.d")
    verify_unit(str(tmp_path / "attnd@.service"))
    changed = set(re.findall(r"^(\w+)=", gpu_drop_in(), re.M))
    assert changed == {"Description", "Environment", "EnvironmentFile", "ExecStart", "ExecStartPre", "RuntimeDirectory",
                       "CacheDirectory"}
    for key in ("ExecStart", "ExecStartPre", "RuntimeDirectory", "CacheDirectory"):  # lists, made anew
        assert re.search(rf"^{key}=\n{key}=.", gpu_drop_in(), re.M), key


def test_the_daemons_of_two_gpus_live_side_by_side(tmp_path):
    """The drop-in's own command lines, with systemd's substitutions, on this machine's CPU."""
    start, check = (re.search(rf"^{key}=/opt/attnd/(attnd .*)$", gpu_drop_in(), re.M).group(1)
                    for key in ("ExecStart", "ExecStartPre"))
    assert check == start.replace("attnd ", "attnd --check_config ", 1)
    defaults = dict(re.findall(r"(ATTND_\w+)=(\S+)", re.search(r"^Environment=ATTND.*$", gpu_drop_in(), re.M).group()))
    assert set(defaults.values()) == {"127.0.0.1"}
    host = f"127.{os.getpid() % 250 + 1}.{os.getpid() // 250 % 250}.1"  # where nobody else listens on these ports
    daemons = []
    try:
        for gpu in "01":
            line = re.sub(r"\$\{(\w+)\}", lambda m: defaults[m.group(1)] and host, start).replace("%i", gpu)
            words = line.replace("$ATTND_OPTIONS", "--backend cpu --memory_limit_mib 64 --drain_delay 0").split()
            ready = tmp_path / gpu
            program = os.path.join(ROOT, "bazel-bin", "server", words[0])
            daemons.append((subprocess.Popen([program, *words[1:], "--port_file", str(ready)], stderr=subprocess.PIPE,
                                             text=True), ready))
        for gpu, (daemon, ready) in enumerate(daemons):
            while not ready.exists():
                assert daemon.poll() is None, daemon.stderr.read()
                time.sleep(0.02)
            assert ready.read_text().split() == [f"707{gpu}"]
    finally:
        for daemon, _ in daemons:
            daemon.terminate()
            daemon.communicate()


def test_container_runs_as_nobody_and_holds_the_bundle_alone():
    text = read("deploy", "Containerfile")
    last_stage = text[text.rindex("\nFROM "):]
    assert "USER 65532:65532" in last_stage and "RUN" not in last_stage
    assert re.findall(r"^COPY (.*)$", last_stage, re.M) == ["--from=build /bundle /opt/attnd"]
    assert 'ENTRYPOINT ["/opt/attnd/attnd"]' in last_stage
    exposed = re.search(r"^EXPOSE (.*)$", last_stage, re.M).group(1).split()
    ports = container(render(os.path.join(KUBERNETES, "overlays", "cpu")))["ports"]
    assert exposed == [str(p["containerPort"]) for p in ports]
