"""The deployment files, checked without a cluster (pytest): what they promise, that what they name exists, and that
the alerts fire. Metric names are those of docs/METRICS.md."""
import glob
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
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


# ---- Runbooks.

RUNBOOKS = os.path.join(ROOT, "docs", "runbooks")
HEADINGS = ["Symptom", "What it means", "Look", "Do", "Over when"]
TOOLS = {"curl", "attnctl", "promtool", "journalctl", "systemctl", "kubectl", "helm", "dmesg", "nvidia-smi", "openssl", "df",
         "iostat", "smartctl", "ss"}


def runbook_errors(name, text, known):
    if not text.startswith(f"# {name}\n"):
        yield "the title is the alert's name"
    if re.findall(r"^## (.*)$", text, re.M) != HEADINGS:
        yield f"its headings are {HEADINGS}"
    if not all(part.strip() for part in re.split(r"^## .*$", text, flags=re.M)[1:]):
        yield "a heading without text"
    commands = "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S)).splitlines()
    if len(commands) != 3 or not {c.split()[0] for c in commands} <= TOOLS:
        yield f"three commands by {TOOLS}"
    prefixes = {re.sub(r"_(bucket|sum|count)?$", "", name) for name in re.findall(r"\battnd_[a-z0-9_]+", text)}
    for prefix in sorted(prefixes):
        if not any(metric.startswith(prefix) for metric in known):
            yield f"no metric {prefix}"


def test_each_alert_has_a_runbook_and_a_board():
    known, names = documented_metrics(), set()
    for rule in filter(lambda r: "alert" in r, alert_rules()):
        name, notes = rule["alert"], rule["annotations"]
        names.add(f"{name}.md")
        assert notes["runbook_url"] == f"docs/runbooks/{name}.md" and notes["dashboard_url"] in [f"/d/{b}" for b in BOARDS]
        assert not list(runbook_errors(name, read("docs", "runbooks", f"{name}.md"), known)), name
    assert set(os.listdir(RUNBOOKS)) == names
    text = read("docs", "runbooks", "AttndDown.md")
    for old, new in (("# AttndDown", "# Down"), ("## Do\n", "## Does\n"), ("\nsystemctl status attnd\n", "\n"),
                     ("`up` is 1.", "`attnd_upp` is 1."), ("\nsystemctl", "\nreboot")):
        assert list(runbook_errors("AttndDown", text.replace(old, new, 1), known)), old


def test_the_table_of_alerts_has_each_with_its_severity():
    rows = dict(re.findall(r"^\| \[(\w+)\]\(runbooks/\1\.md\) \| (\w+) \|", read("docs", "DEPLOY.md"), re.M))
    assert rows == {r["alert"]: r["labels"]["severity"] for r in alert_rules() if "alert" in r}
    pages = re.findall(r"^\| \[(\w+)\]\(runbooks/\1\.md\) \|", read("docs", "operate.md"), re.M)
    assert sorted(pages) == sorted(name for name, severity in rows.items() if severity == "page")


def test_runbooks_name_attnctls_commands():
    done = subprocess.run([os.path.join(ROOT, "bazel-bin", "client", "attnctl"), "--help"], capture_output=True, text=True)
    commands = set(re.findall(r"^  (\w+) {2,}", done.stdout[done.stdout.index("Subcommands:"):], re.M))
    lines = [(name, line) for name in os.listdir(RUNBOOKS)
             for line in re.findall(r"^attnctl (.*)$", read("docs", "runbooks", name), re.M)]
    assert len(lines) > 5
    for name, line in lines:
        words = [word for word in re.sub(r"--\S+ \S*[:\d]\S*", "", line).split() if not word.startswith("-")]
        assert words[0] in commands, (name, line)


# ---- Grafana.

BOARDS = sorted(os.path.splitext(os.path.basename(path))[0] for path in glob.glob(os.path.join(HERE, "grafana", "*.json")))


def dashboard(name):
    return json.loads(read("deploy", "grafana", f"{name}.json"))


def panels(name):
    return [p for p in dashboard(name)["panels"] if p["type"] != "row"]


def expressions(names=BOARDS):
    return [t["expr"] for name in names for p in panels(name) for t in p["targets"]]


def of_the_fleet(name):
    return name == "attnd-fleet"


def test_dashboards_name_metrics_that_exist():
    known = {**documented_metrics(), **{r["record"]: "gauge" for r in alert_rules() if "record" in r}}
    assert BOARDS == ["attnd", "attnd-callers", "attnd-fleet", "attnd-modules"]
    for expression in expressions():
        assert not list(unknown_metrics(expression, known)), expression
        for recorded in re.findall(r"\battnd:[\w:]+", expression):
            assert recorded in known, expression


def test_dashboards_show_each_kind_of_trouble():
    """Every metric that an alert rests on is on a dashboard too."""
    shown = " ".join(expressions())
    for rule in alert_rules():
        for name in re.findall(r"\battnd_\w+_(?:total|seconds|steps)\b", rule["expr"]):
            assert name in shown, (rule, name)


def test_each_dashboard_leads_to_the_others():
    for name in BOARDS:
        assert {link["url"] for link in dashboard(name)["links"]} == {f"/d/{other}" for other in BOARDS}
        assert dashboard(name)["uid"] == name and all(link["includeVars"] for link in dashboard(name)["links"])


@pytest.mark.parametrize("name", BOARDS)
def test_each_panel_is_labelled_and_selects_job_and_instance(name):
    ids = [p["id"] for p in dashboard(name)["panels"]]
    assert len(ids) == len(set(ids))
    wanted = 'job=~"$job"' if of_the_fleet(name) else 'job=~"$job",instance=~"$instance"'
    for panel in panels(name):
        assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            selectors = re.findall(r"\{([^}]*)\}", target["expr"])
            assert selectors and all(wanted in s for s in selectors), target["expr"]
            assert not re.search(r"\[\d+[smh]\]", target["expr"]), target["expr"]
            for counter in re.findall(r"(\S{0,6})\battnd_\w+_total\b", target["expr"]):
                assert counter.endswith("rate("), target["expr"]
    assert not dashboard(name)["editable"]


def test_panels_of_a_device_follow_the_variable():
    """Whatever has the label device is selected by it, but on the board of the whole fleet."""
    rows = re.findall(r"^\| `(\w+)` \| \w+ \| ([^|]*) \|", read("docs", "METRICS.md"), re.M)
    of_devices = {name for name, labels in rows if "device" in labels.replace(" ", "").split(",")}
    found = set()
    for expression in expressions([name for name in BOARDS if not of_the_fleet(name)]):
        for name, selector in re.findall(r"\b(attnd_\w+)\{([^}]*)\}", expression):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            belongs = bool({name, base} & of_devices)
            found |= {base} if belongs else set()
            assert belongs == ('device=~"$device"' in selector), expression
    assert len(found) > 10
    for name in BOARDS:
        variables = [v["name"] for v in dashboard(name)["templating"]["list"]]
        used = set(re.findall(r"\$(job|instance|device)\b", " ".join(expressions([name]))))
        assert variables[0] == "datasource" and set(variables[1:]) == used, name


def test_thresholds_and_annotations_tell_good_from_bad():
    steps = {p["title"]: p["fieldConfig"]["defaults"]["thresholds"]["steps"] for name in BOARDS for p in panels(name)
             if "thresholds" in p["fieldConfig"]["defaults"]}
    assert {"Failed share", "Waiting work", "Ready", "Certificates: time left", "Burn rate",
            "Failed share of module calls"} <= set(steps)
    for title, colours in steps.items():
        values = [step["value"] for step in colours]
        assert values[0] is None and values[1:] == sorted(values[1:]), title
    known = documented_metrics()
    for name in BOARDS:
        notes = {note["name"]: note["expr"] for note in dashboard(name)["annotations"]["list"]}
        assert set(notes) == {"Alerts", "Starts", "Drains"}
        assert not [one for expression in notes.values() for one in unknown_metrics(expression, known)]
        assert of_the_fleet(name) != ("$instance" in " ".join(notes.values()))


def test_panels_do_not_overlap():
    for name in BOARDS:
        cells = set()
        for panel in dashboard(name)["panels"]:
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
    # A frozen daemon is back within a minute.
    assert int(options["WatchdogSec"]) + int(options["TimeoutAbortSec"]) + int(options["RestartSec"]) < 60
    assert options["MemoryMax"] == "75%" and options["OOMPolicy"] == "stop"
    assert options["StateDirectoryMode"] == "0700"
    for key in ("ExecStart", "ExecStartPre"):
        assert "--module_state_dir ${ATTND_STATE} $ATTND_OPTIONS" in options[key]
    assert f"ATTND_STATE=%S/{options['StateDirectory']}\n" in read("deploy", "systemd", "attnd.service")
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
                       "StateDirectory", "CacheDirectory"}
    for key in ("ExecStart", "ExecStartPre", "RuntimeDirectory", "StateDirectory", "CacheDirectory"):  # lists, made anew
        assert re.search(rf"^{key}=\n{key}=.", gpu_drop_in(), re.M), key


def test_the_daemons_of_many_gpus_live_side_by_side(tmp_path):
    """The drop-in's own command lines, with systemd's substitutions, on this machine's CPU."""
    start, check = (re.search(rf"^{key}=/bin/sh -fc '(exec .*)'$", gpu_drop_in(), re.M).group(1)
                    for key in ("ExecStart", "ExecStartPre"))
    assert check == start.replace("/attnd ", "/attnd --check_config ", 1)
    defaults = dict(re.findall(r"(ATTND_\w+)=(\S+)", re.search(r"^Environment=ATTND.*$", gpu_drop_in(), re.M).group()))
    assert set(defaults.values()) == {"127.0.0.1"}
    host = f"127.{os.getpid() % 250 + 1}.{os.getpid() // 250 % 250}.1"  # where nobody else listens on these ports
    program = os.path.join(ROOT, "bazel-bin", "server", "attnd")
    daemons = []
    try:
        for gpu in ("0", "15"):
            ready = tmp_path / gpu
            (tmp_path / f"attnd-{gpu}").mkdir(mode=0o700)  # StateDirectory=
            options = f"--backend cpu --memory_limit_mib 64 --drain_delay 0 --port_file {ready}"
            line = start.replace("%i", gpu).replace("$$", "$").replace("/opt/attnd/attnd", program)
            environment = {**os.environ, **dict.fromkeys(defaults, host), "ATTND_OPTIONS": options,
                           "ATTND_STATE": str(tmp_path / f"attnd-{gpu}")}
            daemons.append((subprocess.Popen(["/bin/sh", "-fc", line], env=environment, stderr=subprocess.PIPE, text=True),
                            ready, gpu))
        for daemon, ready, gpu in daemons:
            while not ready.exists():
                assert daemon.poll() is None, daemon.stderr.read()
                time.sleep(0.02)
            assert ready.read_text().split() == [str(7070 + int(gpu))]
    finally:
        for daemon, _, _ in daemons:
            daemon.terminate()
            daemon.communicate()


# ---- A service manager's watchdog.

class ServiceManager:
    """The socket that systemd gives to a service, and a daemon that reports to it."""

    def __init__(self, folder, watchdog_seconds):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(folder / "notify"))
        ports = folder / "metrics"
        environment = {**os.environ, "NOTIFY_SOCKET": str(folder / "notify"),
                       "WATCHDOG_USEC": f"{watchdog_seconds * 1e6:.0f}"}
        self.process = subprocess.Popen(
            [os.path.join(ROOT, "bazel-bin", "server", "attnd"), "--listen", "127.0.0.1:0", "--metrics_listen",
             "127.0.0.1:0", "--metrics_port_file", str(ports), "--backend", "cpu", "--memory_limit_mib", "64",
             "--drain_delay", "0"],
            env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        assert self.hears("READY=1", 60)
        self.metrics_port = int(ports.read_text())

    def hears(self, state, seconds):
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.socket.settimeout(left)
            try:
                if self.socket.recv(256).decode() == state:
                    return True
            except TimeoutError:
                pass
        return False

    def is_alive(self, seconds):
        """As the kubelet asks."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/livez", timeout=seconds) as answer:
                return answer.status == 200
        except (urllib.error.URLError, TimeoutError):
            return False

    def close(self):
        self.process.kill()
        self.process.wait()
        self.socket.close()


def test_a_frozen_daemon_is_noticed_by_systemd_and_by_kubernetes(tmp_path):
    manager = ServiceManager(tmp_path, watchdog_seconds=3)
    try:
        assert manager.hears("WATCHDOG=1", 3) and manager.hears("WATCHDOG=1", 3) and manager.is_alive(3)
        manager.process.send_signal(signal.SIGSTOP)
        manager.hears("WATCHDOG=1", 0.1)  # one may have been under way
        assert not manager.hears("WATCHDOG=1", 3) and not manager.is_alive(1)
        manager.process.send_signal(signal.SIGCONT)
        assert manager.hears("WATCHDOG=1", 10) and manager.is_alive(10)
        manager.process.terminate()
        assert manager.hears("STOPPING=1", 10)
        assert manager.process.wait(30) == 0
    finally:
        manager.close()


def test_container_runs_as_nobody_and_holds_the_bundle_alone():
    text = read("deploy", "Containerfile")
    last_stage = text[text.rindex("\nFROM "):]
    assert "USER 65532:65532" in last_stage and "RUN" not in last_stage
    assert re.findall(r"^COPY (.*)$", last_stage, re.M) == ["--from=build /bundle /opt/attnd"]
    assert 'ENTRYPOINT ["/opt/attnd/attnd"]' in last_stage


def accepts(arguments, folder):
    """The daemon's own check, with the container's folders made here and no GPU."""
    (folder / "state").mkdir(mode=0o700, exist_ok=True)
    arguments = [a.replace("/var/lib/attnd/", f"{folder}/").replace("=cuda", "=cpu") for a in arguments]
    done = subprocess.run([os.path.join(ROOT, "bazel-bin", "server", "attnd"), *arguments, "--check_config"],
                          capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.returncode == 0


def test_compose_runs_the_daemon_with_few_rights_for_this_host(tmp_path):
    made = yaml.safe_load(read("deploy", "compose", "compose.yaml"))
    assert set(made["services"]) == {"attnd", "attnd-gpu"}
    for service in made["services"].values():
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and accepts(service["command"], tmp_path)
        assert all("127.0.0.1:" in port for port in service["ports"]) and service["mem_limit"]
        assert {volume.split(":")[0] for volume in service["volumes"]} <= set(made["volumes"])
        seconds = int(service["stop_grace_period"].removesuffix("s"))
        assert seconds == int(unit_options()["TimeoutStopSec"])


def test_quadlet_runs_the_daemon_with_few_rights_for_this_host(tmp_path):
    text = read("deploy", "quadlet", "attnd.container")
    options = dict(re.findall(r"^(\w+)=(.*)$", text, re.M))
    assert accepts(options["Exec"].split(), tmp_path)
    assert options["ReadOnly"] == options["NoNewPrivileges"] == options["Notify"] == "true"
    assert all(port.startswith("127.0.0.1:") for port in re.findall(r"^PublishPort=(.*)$", text, re.M))
    volume = options["Volume"].split(":")
    assert os.path.exists(os.path.join(HERE, "quadlet", volume[0])) and volume[2] == "U"
    for key in ("MemoryMax", "WatchdogSec", "RestartPreventExitStatus"):
        assert options[key] == unit_options()[key], key
    section = {name: body for name, body in re.findall(r"^\[(\w+)\]\n(.*?)(?=^\[|\Z)", text, re.M | re.S)}
    known = {"Image", "Exec", "PublishPort", "ReadOnly", "NoNewPrivileges", "DropCapability", "Volume", "Notify",
             "PodmanArgs", "HealthCmd"}  # podman-systemd.unit(5)
    assert set(re.findall(r"^(\w+)=", section["Container"], re.M)) <= known
