"""Environment variables: read in one place, refused by name when they are wrong, and documented as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lockstep
from lockstep import settings
from lockstep.settings import SETTINGS, Setting

SOURCE = Path(lockstep.__file__).parent
DOCS = Path(__file__).parents[1] / "docs" / "compatibility.md"
SECONDS = [setting for setting in SETTINGS if setting.is_seconds]
ACCESSORS = {
    "LOCKSTEP_AGREEMENT_TIMEOUT": settings.agreement_timeout,
    "LOCKSTEP_STALL_SECONDS": settings.stall_seconds,
    "LOCKSTEP_HEARTBEAT_TIMEOUT": settings.heartbeat_timeout,
    "LOCKSTEP_LATE_TIMEOUT": settings.late_timeout,
    "LOCKSTEP_COMPILE_TIMEOUT": settings.compile_timeout,
    "LOCKSTEP_BACKEND": settings.backend,
    "LOCKSTEP_REPORT_DIR": settings.report_dir,
    "LOCKSTEP_INJECT": settings.inject,
    "LOCKSTEP_ARTIFACTS": settings.artifacts,
    "LOCKSTEP_RUN_FOLDER": settings.run_folder,
}


def test_the_documented_table_is_the_code() -> None:
    rows = re.findall(r"^\| `(LOCKSTEP_\w+)` \| (.*) \| (.*) \|$", DOCS.read_text(), re.M)
    assert rows == [(setting.name, setting.meaning, setting.default or "not set") for setting in SETTINGS]


def test_every_setting_has_its_accessor() -> None:
    assert list(ACCESSORS) == [setting.name for setting in SETTINGS]


def test_variables_are_named_in_one_file() -> None:
    by_path = {str(path.relative_to(SOURCE)): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
    naming = {path for path, text in by_path.items() if re.search(r"[\"\']LOCKSTEP_\w+[\"\']", text)}
    assert naming == {"settings.py"}


@pytest.mark.parametrize("setting", SECONDS, ids=lambda setting: setting.name)
def test_seconds(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(setting.name, raising=False)
    assert ACCESSORS[setting.name]() == float(setting.default)
    monkeypatch.setenv(setting.name, " 2.5 ")
    assert ACCESSORS[setting.name]() == 2.5
    monkeypatch.setenv(setting.name, "")
    assert ACCESSORS[setting.name]() == float(setting.default)


@pytest.mark.parametrize("setting", SECONDS, ids=lambda setting: setting.name)
@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf", "10s", "0"])
def test_a_bad_value_is_refused_by_name(setting: Setting, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if value == "0" and setting.may_be_zero:
        assert setting.seconds({setting.name: "0"}) == 0
        return
    monkeypatch.setenv(setting.name, value)
    for read in (ACCESSORS[setting.name], lambda: settings.check({setting.name: value})):
        with pytest.raises(ValueError, match=re.escape(f"{setting.name} is {value!r}")) as caught:
            read()
        assert setting.meaning in str(caught.value)


def test_the_backend_is_torchs_to_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_BACKEND", raising=False)
    assert settings.backend() is None
    monkeypatch.setenv("LOCKSTEP_BACKEND", "cpu:gloo")
    assert settings.backend() == "cpu:gloo"
    settings.check({"LOCKSTEP_BACKEND": "anything"})
