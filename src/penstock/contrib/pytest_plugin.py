"""Fixtures for the tests of applications; pytest finds them once Penstock is installed.

Nothing is imported before a test asks: most runs of pytest have nothing to do with Penstock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from penstock.app import Pipeline
    from penstock.stores.servers import Servers
    from penstock.testing.bench import Bench


def pytest_addoption(parser: pytest.Parser) -> None:
    """The one thing that the plugin has to know."""
    parser.addini("penstock_app", "where the pipeline is, for example shop:pipeline")


@pytest.fixture(scope="session")
def penstock_pipeline(request: pytest.FixtureRequest) -> Pipeline:
    """The application's pipeline. Define a fixture of this name to choose it by yourself."""
    from penstock.cli.invocation import load_pipeline  # noqa: PLC0415 - see above
    from penstock.errors import UsageError  # noqa: PLC0415

    option = "penstock_app"
    name = request.config.getini(option)
    if not name:
        option = "PENSTOCK_APP"
        name = os.environ.get(option)
    if not name:
        raise UsageError(
            "Nothing tells where the pipeline is. Write penstock_app = shop:pipeline into pytest's "
            "configuration, or a session-wide fixture penstock_pipeline that returns it."
        )
    # Wherever pytest was started: its configuration says where the project is.
    return load_pipeline(name, folder=str(request.config.rootpath), option=option)


@pytest.fixture(scope="session")
def penstock_servers() -> Iterator[Servers]:
    """PostgreSQL and Valkey for this run. Define a fixture of this name to bring your own.

    In that PostgreSQL each test creates a database, and that Redis is emptied before each test.
    """
    from penstock.stores.servers import running_servers  # noqa: PLC0415
    from penstock.testing.databases import server_folder  # noqa: PLC0415

    with server_folder() as folder, running_servers(folder, durable=False) as servers:
        yield servers


@pytest.fixture(scope="session")
def penstock_template(penstock_servers: Servers, penstock_pipeline: Pipeline) -> Iterator[str]:
    """The name of the database that those of tests are copies of."""
    from penstock.testing.bench import migrated_template  # noqa: PLC0415

    with migrated_template(penstock_servers, penstock_pipeline) as name:
        yield name


@pytest.fixture
def penstock(
    penstock_servers: Servers, penstock_template: str, penstock_pipeline: Pipeline
) -> Iterator[Bench]:
    """The application's pipeline on servers of the test's own, empty."""
    from penstock.testing.bench import bench_on  # noqa: PLC0415

    with bench_on(penstock_servers, penstock_template, penstock_pipeline) as bench:
        yield bench
