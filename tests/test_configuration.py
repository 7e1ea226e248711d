"""Settings come from the strongest source, say where from, and never show a password."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.core.masking import masked_url
from penstock.core.outgoing import UNSET
from penstock.errors import SettingsError
from penstock.stores.configuration import (
    ResolvedSettings,
    remove_dev_env,
    resolve,
    write_dev_env,
)

URL = "postgresql://user:canary@host:5432/shop"
CANARY = "canary"


def resolved(
    folder: Path,
    arguments: dict[str, Any] | None = None,
    *,
    pyproject: str | None = None,
    **environ: str,
) -> ResolvedSettings:
    """Resolve in a folder of its own, with the given sources and no others."""
    if pyproject is not None:
        (folder / "pyproject.toml").write_text(pyproject)
    variables = {f"PENSTOCK_{name}": value for name, value in environ.items()}
    return resolve({"database_url": URL, **(arguments or {})}, environ=variables, folder=folder)


# ── who wins ───────────────────────────────────────────────────────────────────────────────────


def test_each_source_yields_to_the_one_above_it(tmp_path: Path) -> None:
    (tmp_path / ".penstock").mkdir()
    (tmp_path / ".penstock" / "dev.env").write_text(
        "# a comment\nPENSTOCK_SCHEMA=from_dev\nPENSTOCK_REDIS_PREFIX=from_dev\n\n"
        "PENSTOCK_POLL_SECONDS=9\nPENSTOCK_PUBLISH_BATCH_SIZE=9\n"
    )
    found = resolved(
        tmp_path,
        {"publish_batch_size": 7},
        pyproject="[tool.penstock]\nredis_prefix='from_file'\npoll_seconds=8\npublish_batch_size=8",
        POLL_SECONDS="7.5",
        PUBLISH_BATCH_SIZE="8",
    )
    settings = found.settings
    assert (settings.schema, found.origins["schema"]) == ("from_dev", ".penstock/dev.env")
    assert settings.redis_prefix == "from_file"
    assert found.origins["redis_prefix"] == str(tmp_path / "pyproject.toml")
    assert (settings.poll_seconds, found.origins["poll_seconds"]) == (7.5, "PENSTOCK_POLL_SECONDS")
    assert (settings.publish_batch_size, found.origins["publish_batch_size"]) == (7, "argument")
    assert (settings.wakeup, found.origins["wakeup"]) == ("notify", "default")


def test_the_nearest_pyproject_is_asked_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.penstock]\nschema = 'far'\n")
    inner = tmp_path / "service" / "code"
    inner.mkdir(parents=True)
    assert resolved(inner).settings.schema == "far"
    (tmp_path / "service" / "pyproject.toml").write_text("[project]\nname = 'near'\n")
    assert resolved(inner).settings.schema == "events"


def test_an_argument_that_is_unset_was_not_given(tmp_path: Path) -> None:
    found = resolved(tmp_path, {"schema": UNSET}, SCHEMA="from_environment")
    assert found.settings.schema == "from_environment"


# ── no Redis ───────────────────────────────────────────────────────────────────────────────────


def test_redis_is_absent_unless_it_is_named(tmp_path: Path) -> None:
    found = resolved(tmp_path)
    assert found.settings.redis_url is None
    assert found.origins["redis_url"] == "default"


@pytest.mark.parametrize("value", ["none", "None", ""])
def test_the_environment_can_say_that_there_is_no_redis(tmp_path: Path, value: str) -> None:
    found = resolved(tmp_path, pyproject="[tool.penstock]\nredis_url='redis://h'", REDIS_URL=value)
    assert found.settings.redis_url is None
    assert found.origins["redis_url"] == "PENSTOCK_REDIS_URL"


def test_an_explicit_none_wins_over_the_environment(tmp_path: Path) -> None:
    found = resolved(tmp_path, {"redis_url": None}, REDIS_URL="redis://host:6379/0")
    assert found.settings.redis_url is None
    assert found.origins["redis_url"] == "argument"


# ── what may be absent ─────────────────────────────────────────────────────────────────────────


def test_the_stream_of_dead_letters_may_be_named_or_not(tmp_path: Path) -> None:
    assert resolved(tmp_path).settings.dead_letter_stream is None
    named = resolved(tmp_path, DEAD_LETTER_STREAM="shop.dead")
    assert named.settings.dead_letter_stream == "shop.dead"
    assert named.origins["dead_letter_stream"] == "PENSTOCK_DEAD_LETTER_STREAM"
    assert named.shown()["dead_letter_stream"] == "shop.dead"


@pytest.mark.parametrize("value", ["none", "None", ""])
def test_the_environment_can_say_that_there_is_no_stream_of_dead_letters(
    tmp_path: Path, value: str
) -> None:
    pyproject = "[tool.penstock]\ndead_letter_stream='dead'"
    found = resolved(tmp_path, pyproject=pyproject, DEAD_LETTER_STREAM=value)
    assert found.settings.dead_letter_stream is None
    assert found.origins["dead_letter_stream"] == "PENSTOCK_DEAD_LETTER_STREAM"
    assert resolved(tmp_path, {"dead_letter_stream": None}).settings.dead_letter_stream is None


@pytest.mark.parametrize("value", ["a b", "-dead", "x" * 201, 7, True, ["dead"]])
def test_what_cannot_name_a_stream_is_no_stream_of_dead_letters(
    tmp_path: Path, value: object
) -> None:
    with pytest.raises(SettingsError, match="dead_letter_stream"):
        resolved(tmp_path, {"dead_letter_stream": value})


def test_limits_of_failure_have_defaults_and_bounds(tmp_path: Path) -> None:
    settings = resolved(tmp_path, INBOX_RETENTION_DAYS="90").settings
    assert (settings.inbox_retention_days, settings.parked_per_key_max) == (90.0, 10_000)
    assert resolved(tmp_path, PARKED_PER_KEY_MAX="1").settings.parked_per_key_max == 1
    with pytest.raises(SettingsError, match="parked_per_key_max must be at least 1"):
        resolved(tmp_path, PARKED_PER_KEY_MAX="0")


# ── refusals ───────────────────────────────────────────────────────────────────────────────────


def test_without_a_database_the_three_ways_to_name_it_are_told(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve({}, environ={}, folder=tmp_path)
    message = str(caught.value)
    assert "PENSTOCK_DATABASE_URL=" in message
    assert "[tool.penstock]" in message
    assert "Pipeline(…, database_url=…)" in message


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("PUBLISH_BATCH_SIZE", "many", "a whole number"),
        ("PUBLISH_BATCH_SIZE", "2.5", "a whole number"),
        ("PUBLISH_BATCH_SIZE", "", "a whole number"),
        ("LEASE_SECONDS", "half", "a number"),
        ("LEASE_SECONDS", "inf", "a number"),
        ("LEASE_SECONDS", "nan", "a number"),
        ("WAKEUP", "maybe", '"notify" or "poll"'),
        ("SCHEMA", " ", "a text"),
    ],
)
def test_a_value_that_does_not_fit_names_setting_origin_and_form(
    tmp_path: Path, name: str, value: str, expected: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        resolved(tmp_path, {}, pyproject=None, **{name: value})
    message = str(caught.value)
    assert name.lower() in message
    assert f"PENSTOCK_{name}" in message
    assert expected in message


@pytest.mark.parametrize("value", [True, "one", [1], 2.5, None])
def test_arguments_are_checked_too(tmp_path: Path, value: object) -> None:
    with pytest.raises(SettingsError, match=r"publish_batch_size is .* \(from argument\)"):
        resolved(tmp_path, {"publish_batch_size": value})


def test_relations_between_settings_are_checked_whoever_gave_them(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="lease_renew_seconds must fit twice"):
        resolved(tmp_path, LEASE_SECONDS="5", LEASE_RENEW_SECONDS="3")


@pytest.mark.parametrize("name", ["shutdown_seconds", "heartbeat_timeout_seconds"])
@pytest.mark.parametrize("value", [0.0, 86_401.0])
def test_nobody_is_waited_for_longer_than_a_day(tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(SettingsError, match=f"{name} must be positive, and at most 86400"):
        resolved(tmp_path, {name: value})


@pytest.mark.parametrize(("lease_seconds", "renewal"), [("30", 10.0), ("6", 2.0)])
def test_a_lease_is_renewed_at_a_third_of_it(
    tmp_path: Path, lease_seconds: str, renewal: float
) -> None:
    chosen = resolved(tmp_path, LEASE_SECONDS=lease_seconds)
    assert chosen.settings.lease_renew_seconds == renewal
    assert chosen.origins["lease_renew_seconds"] == "default"


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"DATABSE_URL": "x"}, "PENSTOCK_DATABSE_URL.*did you mean PENSTOCK_DATABASE_URL?"),
        ({"SHEMA": "x"}, "did you mean PENSTOCK_SCHEMA?"),
        ({"pyproject": "[tool.penstock]\nshema='x'"}, "tool.penstock.*did you mean schema?"),
        ({"arguments": {"shema": "x"}}, "argument.*did you mean schema?"),
        ({"pyproject": "tool.penstock = 3"}, "must be a table"),
        ({"pyproject": "[tool"}, "cannot be read"),
    ],
)
def test_what_is_no_setting_is_refused(
    tmp_path: Path, sources: dict[str, Any], expected: str
) -> None:
    with pytest.raises(SettingsError, match=expected):
        resolved(tmp_path, **sources)


def test_names_that_are_not_settings_but_known_pass(tmp_path: Path) -> None:
    resolved(tmp_path, APP="shop:pipeline", NO_USERNS="1", FAILPOINT="", LOG_LEVEL="debug")


def test_what_kubernetes_announces_about_a_service_is_no_setting(tmp_path: Path) -> None:
    resolved(
        tmp_path,
        SERVICE_HOST="10.0.0.1",
        SERVICE_PORT="80",
        SERVICE_PORT_HTTP="80",
        PORT="tcp://10.0.0.1:80",
        REDIS_PORT_6379_TCP_ADDR="10.0.0.1",
    )
    with pytest.raises(SettingsError, match="PENSTOCK_DATABASE_PORT"):
        resolved(tmp_path, DATABASE_PORT="5432")


# ── secrets ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:canary@h:5/d", "postgresql://u:***@h:5/d"),
        ("postgresql://u:c@n/ary:canary@h/d", "postgresql://u:***@h/d"),
        ("redis://:canary@h:1/0", "redis://:***@h:1/0"),
        ("redis://h:1/0?password=canary", "redis://h:1/0?password=***"),
        ("postgresql://h/d?sslpassword=a@canary&x=1", "postgresql://h/d?sslpassword=***&x=1"),
        ("postgresql://u@service:canary@h/d", "postgresql://u@service:***@h/d"),
        ("redis://u/x:canary@h/0", "redis://u/x:***@h/0"),
        ("postgresql://u:ca\nnary@h/d", "postgresql://u:***@h/d"),
        ("postgresql://h/d?p%61ssword=canary", "postgresql://h/d?p%61ssword=***"),
        ("s3://b/x?secret=canary&region=eu", "s3://b/x?secret=***&region=eu"),
        ("s3://b/x?session_token=canary", "s3://b/x?session_token=***"),
        ("postgresql://h/d", "postgresql://h/d"),
        ("postgresql://u@h:5432/d?target_session_attrs=any", None),
    ],
)
def test_passwords_are_masked_wherever_a_url_hides_them(url: str, shown: str | None) -> None:
    assert masked_url(url) == (shown or url)


@pytest.mark.parametrize("name", ["DATABASE_URL", "REDIS_URL"])
@pytest.mark.parametrize(
    "url", ["canary", "mysql://u:canary@h/d", "postgresql:/u:canary@h", "http://u:canary@h:x/d"]
)
def test_a_malformed_url_is_refused_without_repeating_it(
    tmp_path: Path, name: str, url: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve({}, environ={f"PENSTOCK_{name}": url}, folder=tmp_path)
    assert CANARY not in str(caught.value)
    assert caught.value.__cause__ is None
    assert f"PENSTOCK_{name}" in str(caught.value)


def test_a_url_in_the_wrong_setting_is_masked_too(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        resolved(tmp_path, WAKEUP=URL)
    assert CANARY not in str(caught.value)


def test_what_is_shown_holds_no_password(tmp_path: Path) -> None:
    shown = resolved(tmp_path, REDIS_URL=f"redis://:{CANARY}@h:1/0").shown()
    assert CANARY not in repr(shown)
    assert shown["database_url"] == "postgresql://user:***@host:5432/shop"


# ── penstock dev ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("redis_url", ["redis://127.0.0.1:7000/0", None])
def test_a_second_terminal_finds_the_servers_of_dev_until_it_ends(
    tmp_path: Path, redis_url: str | None
) -> None:
    urls = {"database_url": URL} | ({"redis_url": redis_url} if redis_url else {})
    path = write_dev_env(tmp_path, urls)
    assert path.stat().st_mode & 0o777 == 0o600
    found = resolve({}, environ={}, folder=tmp_path)
    assert (found.settings.database_url, found.settings.redis_url) == (URL, redis_url)
    assert found.origins["database_url"] == ".penstock/dev.env"
    write_dev_env(tmp_path, urls)
    remove_dev_env(tmp_path)
    remove_dev_env(tmp_path)
    with pytest.raises(SettingsError, match="No setting says"):
        resolve({}, environ={}, folder=tmp_path)
