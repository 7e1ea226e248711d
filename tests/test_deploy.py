"""The samples in deploy/ fit the command line that they call."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.cli.commands import Commands

DEPLOY = Path(__file__).parent.parent / "deploy"
SERVICE = (DEPLOY / "penstock.service").read_text()
MANIFEST = (DEPLOY / "kubernetes.yaml").read_text()


def options_of(command: str) -> set[str]:
    parameters = Commands(name="penstock").get_command(None, command).params
    return {option for parameter in parameters for option in parameter.opts}


@pytest.mark.parametrize("text", [SERVICE, MANIFEST], ids=["systemd", "kubernetes"])
def test_every_option_exists(text: str) -> None:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    used = set(re.findall(r"--[a-z][a-z-]+", "\n".join(lines)))
    assert used
    assert used <= options_of("run") | options_of("migrate")


def test_the_supervisor_is_given_longer_than_it_gives_its_workers() -> None:
    for text, inner, outer in (
        (SERVICE, r"--graceful-shutdown-timeout (\d+)", r"TimeoutStopSec=(\d+)"),
        (
            MANIFEST,
            r"--graceful-shutdown-timeout=(\d+)",
            r"terminationGracePeriodSeconds: (\d+)",
        ),
    ):
        assert number_in(text, inner) < number_in(text, outer)


def test_only_the_supervisor_is_sent_the_signal() -> None:
    assert "KillMode=mixed" in SERVICE.splitlines()


def test_the_probes_ask_where_somebody_answers() -> None:
    assert set(re.findall(r"path: (\S+)", MANIFEST)) == {"/healthz", "/readyz"}
    port = number_in(MANIFEST, r"--health-port=(\d+)")
    assert number_in(MANIFEST, r"containerPort: (\d+)") == port


def number_in(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return int(found[1])
