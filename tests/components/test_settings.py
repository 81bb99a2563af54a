import os
from pathlib import Path

import pytest

from components.settings import MeshSettings, misspelled
from services.bootstrap.config import BootstrapSettings
from services.decode.config import DecodeSettings
from services.frontend.config import FrontendSettings
from services.prefill.config import PrefillSettings

ALL: list[type[MeshSettings]] = [BootstrapSettings, DecodeSettings, FrontendSettings, PrefillSettings]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("MESH_")]:
        monkeypatch.delenv(name)


def test_the_command_line_wins_over_the_role_and_the_role_over_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DecodeSettings.read([]).model == "smollm2-135m"
    monkeypatch.setenv("MESH_MODEL", "shared")
    assert DecodeSettings.read([]).model == PrefillSettings.read([]).model == "shared"
    monkeypatch.setenv("MESH_DECODE_MODEL", "mine")
    assert DecodeSettings.read([]).model == "mine"
    assert PrefillSettings.read([]).model == "shared"
    assert DecodeSettings.read(["--model", "now"]).model == "now"


def test_nested_settings_of_both_prefixes_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_ENGINE__DTYPE", "float32")
    monkeypatch.setenv("MESH_ENGINE__NUM_PAGES", "64")
    monkeypatch.setenv("MESH_DECODE_ENGINE__NUM_PAGES", "128")
    engine = DecodeSettings.read([]).engine
    assert (engine.dtype, engine.num_pages, engine.page_size) == ("float32", 128, 16)


def test_adapters_are_given_one_by_one_or_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    told = DecodeSettings.read(["--engine.lora", "a=/x", "--engine.lora", "b.2=~/y"]).engine.lora
    assert told == {"a": "/x", "b.2": "~/y"}
    monkeypatch.setenv("MESH_ENGINE__LORA", '{"a": "/x", "Org/B": "/y"}')
    assert DecodeSettings.read([]).engine.lora == PrefillSettings.read([]).engine.lora == {"a": "/x", "Org/B": "/y"}
    monkeypatch.setenv("MESH_DECODE_ENGINE__LORA", '{"a": ""}')
    with pytest.raises(SystemExit, match="it must give each adapter a name and a directory"):
        DecodeSettings.read([])


@pytest.mark.parametrize("settings", ALL)
def test_the_timeout_of_rooms_is_everybodys_though_it_begins_like_the_bootstrap_services_own(
    settings: type[MeshSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bootstrap service took it for a setting `timeout_s` of its own, which it has not, and did not start."""
    monkeypatch.setenv("MESH_BOOTSTRAP_TIMEOUT_S", "7")
    monkeypatch.setenv("MESH_TRANSFER_TIMEOUT_S", "8")
    monkeypatch.setenv("MESH_ROOM_CLEANUP_S", "9")
    read = settings.read([])
    assert (read.bootstrap_timeout_s, read.transfer_timeout_s, read.room_cleanup_s) == (7, 8, 9)


def test_verification_is_asked_of_decode_alone_or_of_the_whole_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not DecodeSettings.read([]).verify_kv
    assert DecodeSettings.read(["--verify-kv"]).verify_kv
    monkeypatch.setenv("MESH_VERIFY_KV", "true")
    assert DecodeSettings.read([]).verify_kv
    for settings in ALL:
        settings.read([])


def test_an_empty_variable_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_ETCD_URL", "")
    assert BootstrapSettings.read([]).etcd_url == "http://127.0.0.1:2379"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("MESH_ECTD_URL", "unknown setting MESH_ECTD_URL: --help lists every name"),
        ("MESH_DECODE_MODLE", "unknown setting MESH_DECODE_MODLE: --help lists every name"),
        (
            "MESH_MAX_LOCAL_PREFILL",
            "unknown setting MESH_MAX_LOCAL_PREFILL: did you mean MESH_DECODE_MAX_LOCAL_PREFILL?",
        ),
        ("MESH_DECODE_ENGIN__DTYPE", "unknown setting MESH_DECODE_ENGIN__DTYPE: --help lists every name"),
    ],
)
def test_a_misspelled_variable_stops_the_start_with_a_hint(
    name: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(SystemExit) as stopped:
        DecodeSettings.read([])
    assert str(stopped.value) == told


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("MESH_DECODE_ENGINE__PAGE_SZE", "64", "page_sze"),
        ("MESH_LEASE_TTL_S", "1", "lease_ttl_s"),
        ("MESH_NAMESPACE", "Two Words", "namespace"),
        ("MESH_DECODE_ENGINE__PAGE_SIZE", "17", "page_size is 17; it must be one of 16, 32, 64, 128"),
    ],
)
def test_a_wrong_value_stops_the_start_and_names_its_setting(
    name: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stopped:
        DecodeSettings.read([])
    assert told in str(stopped.value)


def test_another_roles_variables_and_a_shared_engine_are_no_fault() -> None:
    environ = {"MESH_PREFILL_ANYTHING": "1", "MESH_ENGINE__DTYPE": "x", "MESH_MODEL": "m", "PATH": "/bin"}
    assert misspelled(environ, DecodeSettings) == []
    assert misspelled(environ, BootstrapSettings) == []
    assert misspelled({"MESH_DECODE_X": "1", "MESH_LOG_LEVEL": "info"}, MeshSettings) == []


@pytest.mark.parametrize("settings", ALL)
def test_help_lists_every_setting_with_its_variable(
    settings: type[MeshSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        settings.read(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    prefix = str(settings.model_config["env_prefix"])
    for name in settings.model_fields:
        if name != "engine":
            assert f"--{name.replace('_', '-')}" in text
            assert f"{prefix}{name.upper()}" in text.replace("\n", "").replace(" ", "").upper()


def test_settings_do_not_change_and_the_state_directory_is_expanded() -> None:
    settings = BootstrapSettings.read(["--state-dir", "~/x"])
    assert settings.home == Path.home() / "x"
    with pytest.raises(ValueError, match="frozen"):
        settings.model = "other"  # type: ignore[misc]
