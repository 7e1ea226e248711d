"""What `run` and `dev` share: roles become processes, and a supervisor keeps them running."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, NoReturn

import psycopg
import typer

from penstock.cli.invocation import Invocation
from penstock.cli.output import print_note
from penstock.cli.telling import Telling
from penstock.core.crash_budget import CrashLimits
from penstock.core.leases import ARCHIVER, JANITOR, PUBLISHER, TIMERS
from penstock.core.timer_options import ROLE_PREFIX as TIMER_PREFIX
from penstock.errors import PenstockError
from penstock.ops.quarantine import QuarantineTable
from penstock.ops.workers import read_database_clock, release_dead_worker
from penstock.runtime.children import HEARTBEAT_FD, METRICS_FD, WORKER_ID, ProcessSpec
from penstock.runtime.metric_pipe import Sink
from penstock.runtime.processes import ProcessGroup
from penstock.runtime.quarantine import Quarantine

CONSUMER_PREFIX = "consumer:"
PUBLISHER_ROLES = (PUBLISHER, JANITOR, TIMERS)
"""What runs in the publisher's process, beside it; timers unless they have one of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Supervision:
    """How the processes are run, as the command line says."""

    environment: Mapping[str, str]
    processes: int | None = None
    """Into how many the consumers are packed; None: a process each."""
    shutdown_seconds: float
    heartbeat_timeout_seconds: float
    with_spare: bool = False
    """Whether a process that has imported the application waits to replace one that dies."""
    addresses: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Hosts and ports where probes are answered and metrics told, by the option that says so."""
    on_metrics: Sink | None = None
    """Told what workers count, if anybody wants to know."""


def supervise(invocation: Invocation, roles: Sequence[str], how: Supervision) -> NoReturn:
    """Run these roles until SIGTERM or Ctrl-C, then leave: 0 if everything ended in time."""
    settings = invocation.settings
    with Telling(settings, invocation.pipeline.name, how.addresses) as telling:
        how = replace(how, on_metrics=telling.on_metrics)
        group = ProcessGroup(
            process_specs(invocation, roles, how),
            shutdown_seconds=how.shutdown_seconds,
            on_death=partial(release_dead_worker, settings),
            on_death_seconds=settings.lease_granted_seconds,
            heartbeat_timeout_seconds=how.heartbeat_timeout_seconds,
            limits=CrashLimits(
                crashes_max=settings.crashes_max, window_seconds=settings.crash_window_seconds
            ),
            quarantine=Quarantine(QuarantineTable(settings)),
            spare=spare_spec(invocation, how) if how.with_spare else None,
        )
        for note in telling.start(group):
            print_note(note)
        print_note(f"Running {', '.join(roles)}. Ctrl-C stops.")
        raise typer.Exit(0 if group.run() else 1)


def process_specs(
    invocation: Invocation, roles: Sequence[str], how: Supervision
) -> list[ProcessSpec]:
    """Publisher and archiver in a process of their own; consumers in one each, or packed."""
    arguments = _shared_arguments(invocation, how)

    def spec(name: str, together: Sequence[str], **more: Any) -> ProcessSpec:
        argv = [*arguments, "--worker-id", WORKER_ID]
        argv += [part for role in together for part in ("--role", role)]
        assignment = json.dumps({"roles": list(together), "worker_id": WORKER_ID})
        more["on_metrics"] = how.on_metrics
        return ProcessSpec(name, argv, how.environment, assignment=assignment, **more)

    def consumer_spec(role: str) -> ProcessSpec:
        if role.startswith(TIMER_PREFIX):
            timer = invocation.pipeline.timer_handlers[role.removeprefix(TIMER_PREFIX)]
            return spec(role, [role], quarantine_as=timer.name)
        consumer = invocation.pipeline.consumers[role.removeprefix(CONSUMER_PREFIX)]
        return spec(role, [role], quarantine_as=consumer.name)

    consumers = [role for role in roles if role.startswith((CONSUMER_PREFIX, TIMER_PREFIX))]
    beside = [role for role in PUBLISHER_ROLES if role != TIMERS or TIMERS not in roles]
    specs = [spec(PUBLISHER, beside)] if PUBLISHER in roles else []
    specs += [spec(TIMERS, [TIMERS])] if TIMERS in roles else []
    specs += [spec(ARCHIVER, [ARCHIVER])] if ARCHIVER in roles else []
    for number, together in enumerate(_packed(consumers, how.processes), 1):
        apart = tuple(consumer_spec(role) for role in together)
        is_alone = len(apart) == 1
        specs.append(apart[0] if is_alone else spec(f"consumers-{number}", together, apart=apart))
    return specs


def spare_spec(invocation: Invocation, how: Supervision) -> ProcessSpec:
    """A process that becomes any of the others, once it is told which."""
    argv = [*_shared_arguments(invocation, how), "--spare"]
    return ProcessSpec("spare", argv, how.environment, on_metrics=how.on_metrics)


def _packed(consumers: Sequence[str], processes: int | None) -> list[list[str]]:
    """Round-robin, so that consumers that were written together do not work together."""
    count = len(consumers) if processes is None else min(processes, len(consumers))
    return [list(consumers[number::count]) for number in range(count)]


def _shared_arguments(invocation: Invocation, how: Supervision) -> list[str]:
    argv = [sys.executable, "-m", "penstock"]
    if invocation.app is not None:
        argv += ["--app", invocation.app]
    argv += ["work", "--parent", str(os.getpid())]
    argv += ["--heartbeat-fd", HEARTBEAT_FD]
    argv += ["--metrics-fd", METRICS_FD] if how.on_metrics is not None else []
    argv += ["--heartbeat-timeout", f"{how.heartbeat_timeout_seconds:g}"]
    argv += ["--graceful-shutdown-timeout", f"{how.shutdown_seconds:g}"]
    return [*argv, "--deployed-at", _deployed_at(invocation)]


def _deployed_at(invocation: Invocation) -> str:
    """Now, by the clock that orders deployments, or by this host's where that does not answer."""
    try:
        with invocation.connect("run") as connection:
            return read_database_clock(connection, invocation.settings.schema).isoformat()
    except (PenstockError, psycopg.Error):
        # Said once all the same: a worker that is started again later is no later deployment.
        return datetime.now(UTC).isoformat()
