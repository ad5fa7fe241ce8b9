"""attnd.ray: daemons as actors of a Ray cluster on this machine, which come back when they or their actors crash."""
import os
import signal
import sys
import threading

import numpy as np
import pytest
from conftest import ROOT, SERVER, SOURCE
from test_haproxy import wait_until

import attnd

RAY = os.path.join(ROOT, ".deps/ray")  # where `./dev test` puts it
sys.path.append(RAY)
pytestmark = pytest.mark.rare("ray")
Q = np.ones((1, 1, 4, 8), np.float32)


@pytest.fixture(scope="module")
def cluster():
    import ray
    with pytest.MonkeyPatch.context() as patch:  # Ray's processes inherit it
        patch.setenv("PYTHONPATH", os.pathsep.join([SOURCE, RAY, os.environ["PYTHONPATH"]]))
        for tries_left in (2, 1, 0):  # Ray gives itself 30 s to start, which a busy machine exceeds
            try:
                ray.init(num_cpus=2, resources={"V100": 2}, include_dashboard=False, log_to_driver=False,
                         configure_logging=False)
                break
            except Exception:
                ray.shutdown()
                if tries_left == 0:
                    raise
        yield ray
        ray.shutdown()


def pool(**options):
    import attnd.ray
    return attnd.ray.pool(**{"program": SERVER, "backend": "cpu", "insecure": True, "resources": {"V100": 1}, **options})


def processes():
    """{process id: its command} of daemons that actors have started."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline") as file:
                command = file.read().split("\0")
        except OSError:
            continue
        if command[0] == SERVER and "--stop_at_eof" in command:
            found[int(name)] = command
    return found


def parent(process):
    with open(f"/proc/{process}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def test_daemons_come_back_whatever_dies_and_calls_go_on(cluster, tmp_path):
    others = set(processes())
    with pool(daemons=2, folder=str(tmp_path)) as made:
        assert len(set(made.addresses)) == 2
        daemons = sorted(set(processes()) - others)
        assert len(daemons) == 2
        done, going, errors = [0], [True], []

        def call():
            try:
                with attnd.connect(f"dir:{tmp_path}", wait_for_ready=True, timeout=120) as client:
                    while going[0]:
                        assert (client.forward(Q, Q, Q).out == 1).all()
                        done[0] += 1
            except BaseException as error:
                errors.append(error)
        caller = threading.Thread(target=call)
        caller.start()
        try:
            # A daemon, and the other one's actor, whose daemon ends with it.
            for victim, daemon in ((daemons[0], daemons[0]), (parent(daemons[1]), daemons[1])):
                os.kill(victim, signal.SIGKILL)
                begun = done[0]
                wait_until(lambda daemon=daemon: daemon not in processes(), 60)
                wait_until(lambda: len(set(processes()) - others) == 2, 120)
                wait_until(lambda begun=begun: done[0] > begun + 3 or errors, 60)
        finally:
            going[0] = False
            caller.join()
        assert not errors, errors
        for address in made.addresses:
            with attnd.connect(address, timeout=60) as client:
                client.forward(Q, Q, Q)
    assert set(processes()) <= others and not list(tmp_path.glob("*.addr"))


def test_what_is_wrong_is_said(cluster):
    for options, words in (({"gpus": 0}, "gpus: expected 1 or more, or daemons="),
                           ({"gpus": 3, "daemons": 2}, "as many for each of 2 daemons")):
        with pytest.raises(attnd.InvalidArgument) as raised:
            pool(**options)
        assert words in str(raised.value)
    with pytest.raises(attnd.Unavailable, match="insecure"):
        pool(daemons=1, insecure=False)
    with pytest.raises(attnd.DeadlineExceeded, match="did not serve within 3"):
        pool(gpus=1, timeout=3)
