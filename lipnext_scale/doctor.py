"""Examine this machine, or all nodes of a launch, before a run starts.

    python -m lipnext_scale.doctor [--config configs/digits.yaml] [section.key=value ...]
    torchrun --nproc-per-node 8 -m lipnext_scale.doctor --config configs/imagenet_1b.yaml
    srun python -m lipnext_scale.doctor --config configs/imagenet_1b.yaml

A line for every check: ok, warn or wrong, what it is, and the command or key that fixes it. The
exit code is 0 if nothing is wrong, 1 if something is, 2 for a mistake in the options. With a
configuration its data, memory and directory are checked too; nothing is written, and nothing is
trained. Started as several processes it also tries the network between all of them.
"""

import lipnext_scale.utils.passive  # noqa: F401

import argparse
import json
import os
import sys
from dataclasses import asdict
from functools import partial
from typing import get_args

from lipnext_scale.checks import Finding, State, environment, look, network, wrong
from lipnext_scale.checks.network import Launch, Together, launch_of
from lipnext_scale.utils.errors import ArgumentParser, command, positive


@command
def main(argv: list[str] | None = None) -> None:
    arguments, launch = _parse(argv), launch_of(os.environ)
    findings = (together if launch.world_size > 1 else examine)(launch, arguments)
    if launch.rank > 0:
        for finding in findings:  # rank 0 prints all, but it may not be reached
            if finding.check == "processes" and finding.state == "wrong":
                print(f"rank {launch.rank}: {finding.line()}", file=sys.stderr, flush=True)
        return
    failed = is_wrong(findings)
    if arguments.json:
        values = {"wrong": failed, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(values, indent=1, ensure_ascii=False), flush=True)
    else:
        states = [finding.state for finding in findings]
        counts = [f"{states.count(state)} {state}" for state in get_args(State)]
        print("\n".join([*(f.line() for f in findings), ", ".join(counts)]), flush=True)
    if failed:
        sys.exit(1)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(prog="lipnext_scale.doctor", description="Check before a run starts.")
    parser.add_configuration()
    parser.add_argument("--json", action="store_true", help="findings for programs")
    for option, default, meaning in (
        ("--ranks", None, "processes that the run will have (those started now)"),
        ("--ranks-per-node", None, "of these on one machine (at most 8)"),
        ("--timeout", 60, "seconds to wait for others (60)"),
    ):
        parser.add_argument(option, type=positive, default=default, help=meaning)
    return parser.parse_intermixed_args(argv)


def examine(launch: Launch, arguments: argparse.Namespace) -> list[Finding]:
    """All that one process can find on its machine."""
    here = launch.local_world_size
    findings = look("python", lambda: f"{sys.version.split()[0]}, {sys.executable}")
    findings += look("packages", environment.packages)
    findings += look("cpu", partial(environment.cpus, here))
    findings += look("memory", environment.memory)
    findings += look("shared memory", environment.shared_memory)
    findings += look("driver", environment.driver)
    findings += look("gpu", environment.gpus)
    if launch.world_size == 1:
        findings += look("gloo", partial(network.local_gloo, arguments.timeout))
    if arguments.config is not None or arguments.overrides:
        fix = f"fix {arguments.config}, or install the packages above"
        findings += look("configuration", partial(configured, launch, arguments), fix)
    return findings


def configured(launch: Launch, arguments: argparse.Namespace) -> list[Finding]:
    """The run of a configuration."""
    from lipnext_scale.checks.run import examine_run  # needs torch, which may be missing
    from lipnext_scale.config.launchers import launcher_settings
    from lipnext_scale.config.recipe import load_recipe

    settings = launcher_settings(os.environ, processes=arguments.ranks)
    recipe = load_recipe(arguments.config, arguments.overrides, settings)
    ranks, per_node = arguments.ranks or launch.world_size, arguments.ranks_per_node
    if not per_node:
        per_node = launch.local_world_size if launch.world_size > 1 else min(ranks, 8)
    loads = look("configuration", lambda: f"{arguments.config or 'the arguments'}: loads")
    return loads + examine_run(recipe, ranks, per_node)


def together(launch: Launch, arguments: argparse.Namespace) -> list[Finding]:
    """This process's part in checking all nodes; on rank 0, what was found anywhere."""
    here = partial(examine, launch, arguments) if launch.local_rank == 0 else list[Finding]
    try:
        import torch

        group = Together(launch, arguments.timeout)
    except (ImportError, OSError, RuntimeError) as error:
        place, reason = f"{launch.address} {launch.port}", str(error).splitlines()[0]
        text = f"{launch.name_of(launch.rank)} does not reach the others: {reason}"
        fix = f"nc -vz {place}: a firewall, or MASTER_ADDR and MASTER_PORT; or install torch there"
        return [*(here() if launch.rank == 0 else []), wrong("processes", text, fix)]
    findings = [group.answers()]
    if is_wrong(findings):
        return here() + findings
    findings += look("gloo of all", partial(group.sums, "gloo"))
    if torch.cuda.is_available() and torch.cuda.device_count() > launch.local_rank:
        findings += look("nccl of all", partial(group.sums, "nccl"))
    findings = here() + findings
    return findings + (group.share(findings) if launch.local_rank == 0 else [])


def is_wrong(findings: list[Finding]) -> bool:
    return any(finding.state == "wrong" for finding in findings)


if __name__ == "__main__":
    main()
