"""A real Slurm cluster of two nodes on this machine, for as long as a test needs it.

munged, slurmctld and two slurmd in the foreground, with keys, sockets, state and free ports of
their own in a temporary directory: nothing of a Slurm that the machine may have is touched. The
nodes claim to have what the launchers ask for (GPUs, CPUs, memory), which Slurm takes on trust.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from ctypes import CDLL, c_int, c_ulong
from itertools import chain
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
PATIENCE = 300  # seconds, for anything to happen
UNFINISHED = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}
_PR_SET_PDEATHSIG = 1
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
# So long, and not two minutes, a requeued job is held; and so late a busy machine may start a step.
AuthInfo=socket={directory}/munge.socket,cred_expire=10
# Nodes meet at a port and by a name that follow from it: two clusters must not have the same.
FirstJobId={first_job}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,batch_sched_delay=0
GresTypes=gpu
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} {claims}
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} {claims}
PartitionName=DEFAULT Nodes={nodes[0]},{nodes[1]} OverSubscribe=YES State=UP
PartitionName=main Default=YES
"""
CLAIMS = "CPUs=128 RealMemory=1000000 Gres=gpu:8"
NODES = [f"n{os.getpid()}-{number}" for number in range(2)]


def why_not() -> str | None:
    """Why there can be no cluster here."""
    if os.geteuid() != 0:
        return "a Slurm cluster of our own needs root"
    missing = [name for name in NEEDED if shutil.which(name, path=_path()) is None]
    if missing:
        return f"no {', '.join(missing)} here: apt-get install slurm-wlm munge"
    return None


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


class SlurmCluster:
    """Commands on the cluster."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        others = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "LIPNEXT_"))}
        conf = str(directory / "slurm.conf")
        self.environment = {**others, "PATH": _path(), "SLURM_CONF": conf}

    def run(self, *command: str, cwd: Path | None = None, **variables: str) -> str:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def submit(self, *arguments: str, cwd: Path, **variables: str) -> str:
        """The job's number."""
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd, **variables).strip()

    def field(self, job: str, field: str) -> str:
        """A field of `scontrol show job`."""
        (value,) = re.findall(rf"\b{field}=(\S*)", self.run("scontrol", "show", "job", job))
        return value

    def processes(self) -> list[int]:
        """All that jobs have started."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                environment = (process / "environ").read_bytes().split(b"\0")
                if f"SLURM_CONF={self.directory}/slurm.conf".encode() in environment:
                    found.append(int(process.name))
        return found

    def has_ended(self, job: str) -> bool:
        """For the number of an array: all of its jobs."""
        states = re.findall(r"\bJobState=(\S*)", self.run("scontrol", "show", "job", job))
        return not UNFINISHED.intersection(states)

    def wait_for_end(self, job: str) -> tuple[str, str]:
        """The state in which a job ended, and its exit code."""
        what = f"the end of job {job}"
        wait_until(lambda: self.has_ended(job), what, lambda: self.report(job), every=0.5)
        return self.field(job, "JobState"), self.field(job, "ExitCode")

    def report(self, job: str) -> str:
        """What Slurm knows of a job, of its nodes, and of itself."""
        known = [self.run("scontrol", "show", what) for what in (f"job={job}", "node", "step")]
        logs = [path.read_text().splitlines()[-40:] for path in self.directory.glob("slurm*.log")]
        return "\n".join([*known, *chain.from_iterable(logs)])


def wait_until(
    happened: Callable[[], bool],
    what: str,
    report: Callable[[], str] = lambda: "",
    every: float = 0.1,
) -> None:
    """report: shown if it does not happen. every: seconds between looks."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come in {PATIENCE} s\n{report()}")
        time.sleep(every)


@contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Two idle nodes; afterwards no process and no file of them is left, whatever happened."""
    # Not pytest's directory: the path of munge's socket must be short.
    directory = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster = SlurmCluster(directory)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        stack.callback(_kill_all_of, cluster)
        _write_files(directory)
        for command in _daemons(directory):
            daemon = subprocess.Popen(
                command,
                env=cluster.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=(directory / f"{Path(command[0]).name}.stderr").open("ab"),
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
            stack.callback(_end, daemon)
        _wait_until_ready(cluster)
        yield cluster


def _write_files(directory: Path) -> None:
    for name in ("state", *(f"spool.{node}" for node in NODES)):
        (directory / name).mkdir()
    conf = CONF.format(
        host=socket.gethostname().split(".")[0],
        directory=directory,
        ports=_free_ports(3),
        nodes=NODES,
        claims=CLAIMS,
        first_job=1 + 20 * (os.getpid() % 450),
    )
    (directory / "slurm.conf").write_text(conf)
    for number in range(8):
        (directory / f"gpu{number}").touch()  # Slurm looks whether its devices are there
    (directory / "gres.conf").write_text(f"Name=gpu File={directory}/gpu[0-7]\n")
    key = directory / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)


def _daemons(directory: Path) -> list[list[str]]:
    files = {
        option: str(directory / f"munge.{option}")
        for option in ("socket", "pid-file", "log-file", "seed-file")
    }
    munged = ["munged", "--force", "--foreground", f"--key-file={directory / 'munge.key'}"]
    munged += [f"--{option}={path}" for option, path in files.items()]
    return [
        munged,
        ["slurmctld", "-D", "-i"],
        *(["slurmd", "-D", "-N", node] for node in NODES),
    ]


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _wait_until_ready(cluster: SlurmCluster) -> None:
    """Idle is not all: the first job of a cluster was once refused its GPUs, so a step gets them
    before that."""

    refusals: list[str] = []

    def ready() -> bool:
        try:
            states = cluster.run("sinfo", "--noheader", "-N", "-o", "%T").split()
            if set(states) == {"idle"}:
                cluster.run("srun", "--nodes=2", "--gpus-per-node=8", "true")
                return True
        except AssertionError as refused:  # slurmctld does not answer yet
            refusals.append(str(refused))
        return False

    wait_until(ready, "a cluster that runs steps", lambda: "\n".join(refusals[-3:]))


def _end_with_parent() -> None:
    """Also a test that is killed leaves no cluster behind."""
    CDLL(None).prctl(c_int(_PR_SET_PDEATHSIG), c_ulong(signal.SIGKILL))


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(timeout=5)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _kill_all_of(cluster: SlurmCluster) -> None:
    """What is left of jobs."""
    for process in cluster.processes():
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
