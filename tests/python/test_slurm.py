"""deploy/slurm on SLURM itself: one controller and two nodes on this host, of Debian's packages. Daemons in a partition that
others preempt, whose callers notice nothing."""
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time

import numpy as np
import oracle
import pytest
from conftest import ROOT, SERVER, close, unused_port
from test_haproxy import wait_until

import attnd

pytestmark = pytest.mark.rare("slurm")
DEPLOY = os.path.join(ROOT, "deploy", "slurm")
PACKAGES = os.path.join(ROOT, ".deps", "slurm")  # unpacked
LIBRARIES = os.path.join(PACKAGES, "usr", "lib", "x86_64-linux-gnu")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ReturnToService=2
KillWait=20
MinJobAge=300
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=1000
PartitionName=lend Nodes=n1,n2 Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=30 State=UP
PartitionName=owner Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF State=UP
"""


class Slurm:
    def __init__(self, folder):
        self.folder, self._running = folder, []
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"),
                            "LD_LIBRARY_PATH": f"{LIBRARIES}:{LIBRARIES}/slurm-wlm"}
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir()
        (folder / "slurm.conf").write_text(CONFIGURATION.format(
            host=socket.gethostname().split(".")[0], user=subprocess.check_output(["id", "-un"], text=True).strip(),
            ports=[unused_port() for _ in range(3)], folder=folder, plugins=f"{LIBRARIES}/slurm-wlm"))
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._start("sbin/munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
                    f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed")
        wait_until((folder / "munge.socket").exists)
        self._start("sbin/slurmctld-wlm", "-D", "-c")
        for node in ("n1", "n2"):
            self._start("sbin/slurmd-wlm", "-D", "-N", node, "-d", f"{PACKAGES}/usr/sbin/slurmstepd-wlm")

    def wait(self):
        wait_until(lambda: self.run("sinfo", "-hN", "-p", "lend", "-o", "%T", check=False).split() == ["idle"] * 2, 60)

    def _start(self, program, *arguments):
        log = open(self.folder / f"{os.path.basename(program)}-{len(self._running)}.out", "w")
        self._running.append(subprocess.Popen([f"{PACKAGES}/usr/{program}", *arguments], env=self.environment, stdout=log,
                                              stderr=log, stdin=subprocess.DEVNULL))

    def run(self, program, *arguments, check=True, **variables):
        return subprocess.run([f"{PACKAGES}/usr/bin/{program}", *arguments], env={**self.environment, **variables},
                              check=check, capture_output=True, text=True, cwd=self.folder).stdout

    def stop(self):
        self.run("scancel", "--full", "-u", str(os.getuid()), check=False)
        end = time.monotonic() + 20
        while self.run("squeue", "-h", check=False).strip() and time.monotonic() < end:
            time.sleep(0.2)
        for process in reversed(self._running):
            process.send_signal(signal.SIGTERM)
            process.wait(30)


@pytest.fixture
def slurm(tmp_path):
    made = Slurm(tmp_path)
    try:
        made.wait()
        yield made
    finally:
        made.stop()


def call(client, rng):
    q, k, v = np.float32(rng.normal(size=(3, 1, 2, 16, 32)))
    close(client.forward(q, k, v).out, oracle.forward(q, k, v).out)


def test_a_lent_node_goes_to_its_owner_and_comes_back_while_calls_go_on(slurm, tmp_path, rng):
    addresses = tmp_path / "addresses"
    addresses.mkdir()
    slurm.run("sbatch", "--partition=lend", "--array=0-1", os.path.join(DEPLOY, "attnd.sbatch"), str(addresses),
              "--backend", "cpu", "--memory_limit_mib", "64", "--drain_delay", "1", "--drain_timeout", "20",
              ATTND=SERVER, ATTND_LISTEN="127.0.0.1:0")

    def served():
        return sorted(path.read_text().strip() for path in addresses.glob("*.addr"))

    def logs():
        return "".join(path.read_text() for path in pathlib.Path(tmp_path).glob("slurm*.out"))
    wait_until(lambda: len(served()) == 2, 60)
    first = served()
    with attnd.connect(["127.0.0.1:" + one.split(":")[-1] for one in first], timeout=30) as client:
        for _ in range(4):
            call(client, rng)
        slurm.run("sbatch", "--partition=owner", "--wrap", "sleep 3")
        end = time.monotonic() + 240  # SLURM looks at grace times every 30 s; one of 30 s may have ended by then
        while set(served()) == set(first):
            call(client, rng)  # none fails
            assert time.monotonic() < end, slurm.run("squeue", "--states=all") + logs()
        for _ in range(4):
            call(client, rng)
    # The owner's job ends, and the daemon that went starts again where it was.
    wait_until(lambda: len(served()) == 2, 150)
    assert served() != first
    assert "event=draining" in logs() and "event=stopped" in logs()


@pytest.mark.parametrize("script, verb", [("prolog.sh", ["stop"]), ("epilog.sh", ["start", "--no-block"])])
def test_prolog_and_epilog_stop_and_start_the_daemons_of_the_jobs_gpus(script, verb, tmp_path):
    fake = tmp_path / "systemctl"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for gpus, units in (("0,3", ["attnd@0.service", "attnd@3.service"]), ("12", ["attnd@12.service"])):
        done = subprocess.run([os.path.join(DEPLOY, script)], env={**environment, "SLURM_JOB_GPUS": gpus}, check=True,
                              capture_output=True, text=True)
        assert done.stdout.split() == [*verb, *units]
    done = subprocess.run([os.path.join(DEPLOY, script)], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == ""


def test_shellcheck_finds_nothing():
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck here")
    scripts = [os.path.join(DEPLOY, name) for name in os.listdir(DEPLOY)]
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
