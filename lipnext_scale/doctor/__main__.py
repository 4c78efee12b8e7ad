"""Look at this machine, or at all nodes of a launch, before a run does.

    python -m lipnext_scale.doctor [--config configs/digits.yaml] [section.key=value ...]
    torchrun --nproc-per-node 8 -m lipnext_scale.doctor --config configs/imagenet_1b.yaml
    srun python -m lipnext_scale.doctor --config configs/imagenet_1b.yaml

A line for every check: ok, warn or wrong, what it is, and the command or key that mends it. The
exit code is 0 if nothing is wrong, 1 if something is, 2 for a mistake in the arguments. With a
configuration its data, memory and directory are looked at too; nothing is written, and nothing is
trained. Started as several processes it also tries the network between all of them.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lipnext_scale.doctor import environment, network
from lipnext_scale.doctor.network import Launch, launch_of
from lipnext_scale.doctor.report import (
    Finding,
    as_json,
    as_text,
    exit_code,
    look,
    of_error,
    wrong,
)
from lipnext_scale.errors import ArgumentParser, UserError, command

if TYPE_CHECKING:  # what needs torch is imported where it is looked at: it may be missing
    from lipnext_scale.recipe import Recipe


@command
def main(argv: list[str] | None = None) -> None:
    arguments = _parse(argv)
    launch = launch_of(os.environ)
    findings = (
        examine_all(launch, arguments) if launch.world_size > 1 else examine(launch, arguments)
    )
    if launch.rank > 0:
        _tell_aside(launch, findings)
        return
    print(as_json(findings) if arguments.json else as_text(findings), flush=True)
    if exit_code(findings):
        sys.exit(1)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(prog="lipnext_scale.doctor", description="Look before a run does.")
    parser.add_argument("--config", help="YAML file, such as configs/digits.yaml")
    parser.add_argument("--json", action="store_true", help="findings for programs")
    parser.add_argument(
        "--ranks", type=int, default=0, help="processes that the run will have (those started now)"
    )
    parser.add_argument(
        "--ranks-per-node", type=int, default=0, help="of these on one machine (at most 8)"
    )
    parser.add_argument("--timeout", type=int, default=60, help="seconds to wait for others (60)")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="set over the file"
    )
    arguments = parser.parse_intermixed_args(argv)
    for name, least in (("ranks", 0), ("ranks_per_node", 0), ("timeout", 1)):
        if getattr(arguments, name) < least:
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option} {getattr(arguments, name)}: must be at least 1")
    for override in arguments.overrides:
        if "=" not in override:
            raise UserError(f"argument {override!r}: must have the form section.key=value")
    if arguments.config is not None and not Path(arguments.config).is_file():
        raise UserError(f"--config {arguments.config}: no such file")
    return arguments


def examine(launch: Launch, arguments: argparse.Namespace) -> list[Finding]:
    """All that one process can find on its machine."""
    here = launch.local_world_size
    findings = look("python", environment.python)
    findings += look("packages", environment.packages)
    findings += look("cpu", partial(environment.cpus, here))
    findings += look("memory", environment.memory)
    findings += look("shared memory", environment.shared_memory)
    findings += look("libjpeg-turbo", environment.jpeg)
    recipe: Recipe | None = None
    if arguments.config is not None or arguments.overrides:
        recipe, told = _load(arguments)
        findings += told
    findings += look("gpu", partial(environment.gpus, here, recipe))
    findings += look("nccl", environment.nccl)
    if launch.world_size == 1:
        findings += look("gloo", partial(network.local_gloo, arguments.timeout))
    if recipe is not None:
        findings += look("run", partial(examine_run, recipe, launch, arguments))
    return findings


def _load(arguments: argparse.Namespace) -> "tuple[Recipe | None, list[Finding]]":
    try:
        from lipnext_scale.doctor.run import configuration
        from lipnext_scale.launch_environment import launcher_settings
    except ImportError as error:
        told = wrong("configuration", f"cannot be read: {error}", "install the packages above")
        return None, [told]
    try:
        launcher = launcher_settings(os.environ, processes=arguments.ranks)
    except UserError as error:
        return None, [of_error("launcher", error, "mend the launcher's configuration")]
    recipe, finding = configuration(arguments.config, arguments.overrides, launcher)
    return recipe, [finding]


def examine_run(recipe: "Recipe", launch: Launch, arguments: argparse.Namespace) -> list[Finding]:
    from lipnext_scale.doctor import run

    ranks = arguments.ranks or launch.world_size
    per_node = arguments.ranks_per_node
    if not per_node:
        per_node = launch.local_world_size if launch.world_size > 1 else min(ranks, 8)
    findings = look("batch", partial(run.batch, recipe, ranks))
    findings += look("memory of the run", partial(run.memory, recipe, ranks, per_node))
    of_sets, catalogs = run.shards(recipe)
    findings += of_sets
    findings += look("copies of shards", partial(run.room_for_copies, recipe))
    findings += look("run.dir", partial(run.directory, recipe))
    findings += look("disk", partial(run.disk, recipe, catalogs))
    return findings


def examine_all(launch: Launch, arguments: argparse.Namespace) -> list[Finding]:
    """This process's part in looking at all nodes; on the first, what was found anywhere."""
    try:
        import torch
    except (ImportError, OSError) as error:  # not there, or a library of it is not
        return _alone(launch, arguments, error)
    from lipnext_scale.doctor.network import Together

    try:
        together = Together(launch, arguments.timeout)
    except RuntimeError as error:
        place, reason = f"{launch.address}:{launch.port}", str(error).splitlines()[0]
        mend = f"nc -vz {launch.address} {launch.port}: a firewall, or MASTER_ADDR and MASTER_PORT"
        return [wrong("processes", f"rank {launch.rank}: {place} is not reached: {reason}", mend)]
    findings = together.answers()
    if not exit_code(findings):
        findings += look("hosts", together.reaches)
        findings += look("gloo of all", partial(together.sums, "gloo"))
        if torch.cuda.is_available() and torch.cuda.device_count() > launch.local_rank:
            findings += look("nccl of all", partial(together.sums, "nccl"))
    if launch.speaks:
        findings = examine(launch, arguments) + findings
    if launch.speaks and len(together.hosts) == launch.world_size:
        findings += together.share(findings)
    return findings


def _alone(launch: Launch, arguments: argparse.Namespace, error: Exception) -> list[Finding]:
    """Without torch nobody can be met: a node is looked at, and the first one tells of itself."""
    if not launch.speaks:
        return []
    reason = str(error).splitlines()[0]
    text = f"not tried by {launch.name_of(launch.rank)}: torch cannot be imported: {reason}"
    untried = wrong("processes", text, "install torch there; see its package's line")
    return [*(examine(launch, arguments) if launch.rank == 0 else []), untried]


def _tell_aside(launch: Launch, findings: list[Finding]) -> None:
    """The first process tells all; but one that does not reach it must speak for itself."""
    for finding in findings:
        if finding.check == "processes" and finding.state == "wrong":
            print(f"rank {launch.rank}: {finding.line()}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
